"""Compare two passes' captured distributions token by token, exactly or with proven bounds."""
