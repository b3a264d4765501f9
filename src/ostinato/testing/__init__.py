"""Helpers for testing multi-rank code in a single process."""
