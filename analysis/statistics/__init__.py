"""What is computed from a run's numbers: estimators, intervals, change points, correlations and the terms of the loss."""
