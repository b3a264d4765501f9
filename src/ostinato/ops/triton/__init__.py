"""Triton kernels of the operators."""
