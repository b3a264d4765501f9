"""What runs in place of modules of transformers, and the checks that it may."""
