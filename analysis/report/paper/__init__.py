"""A report's charts as figures for papers: PNG, PDF and CSV."""
