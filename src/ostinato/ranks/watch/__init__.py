"""Noticing ranks that died or hang, and ending the others."""
