"""What every folder of the command line uses: errors, console, tables, files."""
