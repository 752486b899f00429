"""Break down a mismatch by probability, position, length, entropy and the loss's ratios."""
