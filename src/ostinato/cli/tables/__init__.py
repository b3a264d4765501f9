"""Results as tables for a terminal, within 80 columns."""
