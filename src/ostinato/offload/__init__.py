"""Weights of some layers in host memory, copied to the device while other layers run."""
