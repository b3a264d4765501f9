"""The decoder that we wrote: fused parameters, one class for many families."""
