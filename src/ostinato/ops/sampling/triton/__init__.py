"""Kernels of sampling, in Triton."""
