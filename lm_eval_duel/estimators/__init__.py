"""Ways to turn predictions into the log-probability of a window."""
