"""The weights of every policy version, bit for bit."""
