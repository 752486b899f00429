"""Re-score recorded tokens under other numerics."""
