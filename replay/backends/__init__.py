"""Scoring code: the trainer's own, ours over a transformers model, vLLM, and the exact engine."""
