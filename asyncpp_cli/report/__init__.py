"""`asyncpp report`: `load/` reads run folders, `analysis/` averages and compares cells, `tables/` declares
columns and tables, `formats/` writes them."""
