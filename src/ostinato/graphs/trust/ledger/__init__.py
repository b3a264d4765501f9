"""The address ledger: which memory every graph holds, whose it is, and whether it is still there."""
