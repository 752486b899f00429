"""Check conditions on the metrics of a run, for the CI of training code."""
