"""Scoring code: the trainer's own code, our code for transformers models, vLLM, and the exact engine."""
