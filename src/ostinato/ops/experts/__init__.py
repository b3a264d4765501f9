"""Mixtures of experts: routing, and the GEMMs of the chosen experts."""
