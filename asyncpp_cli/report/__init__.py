"""`asyncpp report`: load the runs of an experiment, aggregate them into cells, render the cells.

`load` reads the run folders, `measure` turns one run's metrics into numbers, `aggregate` averages runs that
differ in the seed alone and compares each cell with its synchronous counterpart, `words` and `conditions` say
what stands under the table, and `render` writes it all as a terminal table, Markdown, CSV or JSON.
"""
