"""Which graphs there are, and which one a batch runs. Pure Python, no tensors."""
