"""The parts of a step: how its graphs run, decode batches, batches with prompts."""
