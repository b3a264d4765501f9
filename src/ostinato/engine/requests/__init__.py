"""What an engine runs: prompts and images read, requests checked, completions as they grow."""
