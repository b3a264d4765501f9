"""Between callers and the engine's thread: commands in one direction, answers in the other."""
