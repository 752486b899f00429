"""Which fault, which class of numerics, whether it is normal, and what would settle it."""
