"""An audit: a run computed again by `reference.py`, and its network compared with the checkpoint's own code."""
