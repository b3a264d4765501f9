"""Piecewise graphs with torch.compile; see ``backend.py``. Importing this package is free."""
