"""Every other causal LM, through transformers' own modules."""
