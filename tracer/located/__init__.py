"""Results of `locate` stored in a trace under `locate/`: their contents, writing and reading."""
