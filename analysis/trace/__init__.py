"""Open traces as one database with views of their tables and tokens, and with stored sums."""
