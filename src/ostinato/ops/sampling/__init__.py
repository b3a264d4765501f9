"""From logits to tokens: filters, penalties, random numbers, log-probabilities, drafts."""
