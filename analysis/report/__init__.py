"""A run as one file that a tired engineer understands in a minute."""
