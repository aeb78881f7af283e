"""Reports of runs: figures, tables and a page. The only folder that plots."""
