"""The operators of a decoder step: each with its torch twin, and Triton kernels where they pay."""
