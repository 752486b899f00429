"""Export a trace to the file formats of other tools."""
