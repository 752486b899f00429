"""Scorers: the trainer's own code, a built-in scorer for transformers models, vLLM, and the exact engine."""
