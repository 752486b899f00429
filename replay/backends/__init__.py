"""Scorers that run the trainer's own code, a built-in scorer for transformers models, vLLM, or the exact engine."""
