"""Forward pass in which each token's bits depend only on the token and its context, so there is no mismatch."""
