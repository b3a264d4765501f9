"""Several ranks: who owns what, how they talk, and what they must agree on."""
