"""The figures. Each file has a function that computes what is plotted, and one that draws it."""
