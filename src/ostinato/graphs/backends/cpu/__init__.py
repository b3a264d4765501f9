"""Record and replay of dispatched operators."""
