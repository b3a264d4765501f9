"""Requests in, tokens out: the engine, its start-up, and which thread may use it when."""
