"""Conditions on a run, for the checks of training code."""
