"""Layers with a state per request: what they keep between steps, and how tokens advance it."""
