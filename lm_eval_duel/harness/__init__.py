"""The model that lm-evaluation-harness sees. Every interpreter start imports this file, so it imports nothing."""
