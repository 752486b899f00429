"""The numbers that frameworks log, under their own names and by their own definitions: one file a framework."""
