"""Decides which requests run in the next step, in which blocks. Bookkeeping without torch."""
