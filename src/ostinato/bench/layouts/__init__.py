"""What one rank of a parallel layout computes, measured on one GPU."""
