"""CUDA graphs, driven directly."""
