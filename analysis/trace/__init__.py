"""Open traces as one database with views, macros and stored sums."""
