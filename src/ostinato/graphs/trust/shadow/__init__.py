"""Shadow replay: a step is run eagerly beside its graph, and both must leave the same bits."""
