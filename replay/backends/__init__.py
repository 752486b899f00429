"""What scores tokens: the trainer's own code, or ours over a transformers model."""
