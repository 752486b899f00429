"""Record traces: the recorder, framework hooks, importers and the trace's files."""
