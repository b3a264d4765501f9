"""Samples tokens from logits, with each request's parameters."""
