"""Sleep mode: memory that is given back and comes back at the same addresses."""
