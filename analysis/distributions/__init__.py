"""Compare the captured distributions of two passes per token, exactly or with proven bounds."""
