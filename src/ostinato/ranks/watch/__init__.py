"""Noticing ranks that died or hang, and ending the others; Ctrl-C on a rank."""
