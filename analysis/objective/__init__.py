"""What the mismatch does to the objective that a run trained on."""
