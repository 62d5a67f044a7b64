"""Networks in transformers' own classes."""
