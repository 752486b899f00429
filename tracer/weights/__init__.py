"""Weights for every policy version, bit for bit."""
