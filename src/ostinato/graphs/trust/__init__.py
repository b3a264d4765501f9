"""Whether a graph does what eager code does: tried, compared, watched."""
