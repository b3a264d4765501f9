"""Requests in, tokens out: the engine, its start-up, and who may use it when."""
