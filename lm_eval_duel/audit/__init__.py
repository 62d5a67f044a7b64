"""An audit: what a run computed, once more by `reference.py`, and the network beside the checkpoint's own code."""
