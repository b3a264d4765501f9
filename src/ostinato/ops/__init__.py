"""Operators with a plain implementation and faster ones beside it."""
