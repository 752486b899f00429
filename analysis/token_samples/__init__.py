"""Read chosen sequences of a trace token by token, with their text."""
