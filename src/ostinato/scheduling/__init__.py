"""Which requests run in the next step, in which blocks. Bookkeeping: no torch."""
