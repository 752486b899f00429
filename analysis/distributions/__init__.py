"""Compare two passes' captured distributions, exactly or with proven bounds."""
