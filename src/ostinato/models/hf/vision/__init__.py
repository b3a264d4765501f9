"""Image-and-text models: encoders, and where their rows enter the prompt."""
