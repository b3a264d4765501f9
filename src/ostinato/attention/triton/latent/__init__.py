"""Latent attention: rows stored, keys expanded for long prompts, all others absorbed."""
