"""Forward pass whose bits depend only on a token and its context (the zero-mismatch baseline)."""
