"""Alert rules for `diagnose`, `watch` and the report."""
