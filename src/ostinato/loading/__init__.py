"""From a model's name to a model that can run."""
