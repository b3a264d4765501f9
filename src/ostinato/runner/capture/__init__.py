"""Captures the graphs of a runner's plans: which ones, in how much memory, and what they took."""
