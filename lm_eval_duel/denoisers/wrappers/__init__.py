"""Denoisers that wrap a denoiser."""
