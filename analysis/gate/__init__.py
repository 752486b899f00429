"""Check conditions on a run's metrics in training CI."""
