"""A report as one file of HTML."""
