"""Forward passes in which a token's bits depend only on the token and its context, not on batch, padding or mode."""
