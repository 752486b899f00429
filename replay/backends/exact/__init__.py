"""A forward pass in which a token's result, to the bit, depends only on the token and its context (zero mismatch)."""
