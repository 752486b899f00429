"""How a mismatch spreads over tokens: its shape over probability, place, length, entropy and the loss's ratios."""
