"""The model that lm-evaluation-harness sees."""
