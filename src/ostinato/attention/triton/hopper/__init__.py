"""What the warps of kernels for Hopper do, written in Gluon."""
