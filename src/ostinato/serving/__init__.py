"""Serving: ``AsyncLLM``, an engine in a thread of its own, and the HTTP server around it.

Only what ``app.py`` imports needs FastAPI; ``AsyncLLM`` does not.
"""
