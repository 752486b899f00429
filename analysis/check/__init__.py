"""Whether two passes can be compared at all, and which fault lies between them when not."""
