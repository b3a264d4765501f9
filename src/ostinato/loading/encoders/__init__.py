"""Models that embed or classify: which checkpoints are such, how they pool, and loading one."""
