"""Estimators, intervals, change points, correlations and loss terms."""
