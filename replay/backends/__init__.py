"""Scoring code: the trainer's own, our implementation for transformers models, vLLM's, and the exact engine's."""
