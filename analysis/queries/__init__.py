"""Named queries, one a file: `tim-trace query`."""
