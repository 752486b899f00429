"""Record traces: the recorder, hooks for training frameworks, importers, and the files of a trace."""
