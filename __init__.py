"""tim-trace: record, replay and query the training-inference mismatch of LLM RL runs."""

__version__ = "0.1.0"
