"""The distributions that passes captured, compared token by token: exactly, or within bounds that are proven."""
