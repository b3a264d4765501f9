"""Piecewise graphs by torch.compile; see ``backend.py``. Importing this package imports nothing."""
