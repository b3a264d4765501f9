"""Causal language models, as the runner sees them."""
