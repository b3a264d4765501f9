"""Tokens from logits, by the parameters of each request."""
