"""Results of `locate` in a trace, `locate/`: what they hold, writing and reading them."""
