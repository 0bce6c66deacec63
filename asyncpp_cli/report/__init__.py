"""`asyncpp report`: `load/` reads run folders, `analysis/` averages and compares cells, `layout/` declares
columns and tables, `formats/` writes them."""
