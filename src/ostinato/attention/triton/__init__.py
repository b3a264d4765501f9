"""Triton kernels of attention, each beside its launch.

Kernels read every length on the device, and a launch depends on shapes alone, so one launch in a
CUDA graph serves any batch of its size.

OVERLAP (programmatic dependent launch): a kernel lets the next one start early, and waits for the
previous one before it touches memory that other kernels write. Lengths, tables and the model's own
tensors are read before the wait. So between the kernel that writes lengths and tables and the first
layer there must be one that is launched without overlap, such as the embedding lookup.

Exponentials and logarithms are to base 2 throughout, as the hardware has them.
"""
