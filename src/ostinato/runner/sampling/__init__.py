"""How a step samples beyond a temperature: filtered rows, drafts, graphs of the full sampler."""
