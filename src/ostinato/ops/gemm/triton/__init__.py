"""Kernels of GEMMs and LoRA, in Triton and Gluon."""
