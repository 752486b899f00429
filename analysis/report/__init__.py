"""Reports: the analysis of a run in one file, readable in a minute."""
