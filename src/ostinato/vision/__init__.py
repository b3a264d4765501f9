"""Images in prompts: read, encoded under graphs of their own, and placed among the tokens."""
