"""Text in, windows out; how a scorer of texts is loaded. It needs no lm-eval."""
