"""Estimators, intervals, change points, correlations and the terms of the loss."""
