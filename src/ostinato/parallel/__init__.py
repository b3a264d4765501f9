"""Runs one model on several ranks: layouts, collectives, sharded models, agreement."""
