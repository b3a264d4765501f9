"""Between callers and the engine's thread: what is asked for, and what comes back."""
