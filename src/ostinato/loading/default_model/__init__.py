"""The embedded default, SmolLM2-135M-Instruct: its GGUF file found, and converted once."""
