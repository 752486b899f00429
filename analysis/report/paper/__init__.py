"""The charts of a report as figures for papers: PNG, PDF and CSV."""
