"""Score recorded tokens again under different numerics."""
