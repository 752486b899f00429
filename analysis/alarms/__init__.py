"""Alert rules, shared by `diagnose`, `watch` and the report."""
