"""Models that read a text once: embeddings, scores of pairs, classes. No KV cache, no sampler."""
