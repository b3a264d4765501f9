"""Language models: the native decoder, and any other causal LM through transformers' modules."""
