"""Reports on runs, each in one file that can be read in a minute."""
