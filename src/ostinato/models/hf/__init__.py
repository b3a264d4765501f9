"""Runs every other causal LM through transformers' modules."""
