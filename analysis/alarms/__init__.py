"""Which alerts fire, over which steps: one rule for `diagnose`, `watch` and the report."""
