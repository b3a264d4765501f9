"""LoRA adapters: read from PEFT checkpoints, kept in slots on the device, applied row by row."""
