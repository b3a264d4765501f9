"""One step on the device: state, inputs, the model's graphs, and results on their way back."""
