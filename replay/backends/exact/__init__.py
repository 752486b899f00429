"""Forward pass with bits that depend only on a token and its context (the zero-mismatch baseline)."""
