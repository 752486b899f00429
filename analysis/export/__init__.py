"""A trace in the files of other tools."""
