"""Estimators over the sets of masked positions of a block: all orders, and samplers with many orders."""
