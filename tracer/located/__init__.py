"""Results of `locate`, stored in a trace under `locate/`: their contents, and how they are written and read."""
