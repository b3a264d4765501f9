"""The core: capture, dispatch and replay for any PyTorch callable. Knows nothing about models."""
