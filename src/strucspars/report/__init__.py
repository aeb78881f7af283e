"""Runs as something to look at: figures, tables and a page. The only home of plotting."""
