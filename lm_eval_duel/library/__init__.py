"""The Python library: `Duel` with text in and text out."""
