"""Kernels written in Triton. Importing one needs Triton, so nothing here is imported up front."""
