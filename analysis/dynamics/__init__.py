"""Find when a run's series changed, and which changed first."""
