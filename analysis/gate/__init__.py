"""Check conditions on the numbers of a run, for use in the CI of training code."""
