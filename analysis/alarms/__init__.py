"""Alert rules of `diagnose`, `watch` and the report."""
