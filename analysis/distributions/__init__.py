"""Compare the captured distributions of two passes token by token: exactly, or with proven bounds."""
