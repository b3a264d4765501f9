"""Operators: a reference in plain torch each, and faster kernels beside it."""
