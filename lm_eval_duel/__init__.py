"""Exact likelihood of masked diffusion language models, as a model of lm-evaluation-harness.

Nothing is imported here: the registration hook loads this package at every interpreter start.
"""
