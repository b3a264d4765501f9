"""The runtime: a model runner and a small engine that run language models through the graphs."""
