"""Prompts and conversations to tokens, tokens to text."""
