"""A forward pass whose bits depend on a token and what came before it, and on nothing else: the zero-mismatch control."""
