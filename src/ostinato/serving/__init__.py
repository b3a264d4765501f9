"""Serving: ``AsyncLLM``, an engine in a thread of its own, and in ``http`` the server around it.

Only ``http`` needs FastAPI.
"""
