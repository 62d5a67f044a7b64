"""Denoisers around a denoiser."""
