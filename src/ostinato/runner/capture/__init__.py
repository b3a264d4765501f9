"""Capturing the graphs of a runner's plans: which ones, in which room, and what they took."""
