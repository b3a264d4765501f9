"""Checks that a graph does what eager code does: by trials, comparisons and watched state."""
