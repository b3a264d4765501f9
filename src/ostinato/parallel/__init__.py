"""A model on several ranks: layouts, collectives, sharded models, agreement."""
