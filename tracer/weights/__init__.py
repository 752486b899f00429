"""Bit-exact weights for every policy version."""
