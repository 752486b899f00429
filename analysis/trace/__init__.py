"""Open traces as one database, with views of their tables, their tokens, and the sums stored for them."""
