"""The native decoder: one layer body, families as tables, kernels as strategies."""
