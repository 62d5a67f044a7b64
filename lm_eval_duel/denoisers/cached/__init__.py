"""The cached samplers: bidirectional denoisers under a prefix or dual cache."""
