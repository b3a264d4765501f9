"""Predicts what a parallel layout costs before it is run."""
