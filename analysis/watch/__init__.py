"""A view of a run while it is being recorded: what was counted, kept, judged, and how it is shown."""
