"""Find when the series of a run changed, and which changed first."""
