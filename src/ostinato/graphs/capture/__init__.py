"""Recording and replaying: pools, segments, buffers, the context of a forward."""
