"""Models that embed or classify: which checkpoints these are, how they pool, and loading one."""
