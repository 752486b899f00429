"""Re-scoring recorded tokens under other numerics."""
