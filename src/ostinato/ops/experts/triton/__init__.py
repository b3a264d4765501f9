"""Kernels of routing and experts, in Triton."""
