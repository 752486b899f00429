"""Break down a mismatch by probability, position, length and entropy."""
