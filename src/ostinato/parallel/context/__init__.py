"""Decode context parallel: the KV cache split over ranks by token."""
