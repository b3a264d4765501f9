"""The address ledger: which memory graphs hold, whose it is, and whether it is still there."""
