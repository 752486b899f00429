"""Scoring code: the trainer's own, ours for transformers models, vLLM, and the exact engine."""
