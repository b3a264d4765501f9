"""GEMMs: `linear` with its fusions, LoRA inside and beside them, and the choice of tiles."""
