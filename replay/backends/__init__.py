"""Scorers: TRL's own scoring code, tim-trace's code for transformers models, vLLM, and the exact engine."""
