"""Reports: the analysis of a run as one file that can be understood in a minute."""
