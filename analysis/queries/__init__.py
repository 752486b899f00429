"""The named queries run by `tim-trace query`, one SQL file per query."""
