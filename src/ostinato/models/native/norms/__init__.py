"""The norms of a layer: modules with one interface, each with its fused operators."""
