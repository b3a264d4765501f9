"""Runs one step on the device: request state, inputs, the model's graphs, and results."""
