"""Attention with torch operators alone: the reference for kernels, and what runs without them."""
