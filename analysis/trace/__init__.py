"""A trace as one database: its views, its tokens and the sums that are kept of them."""
