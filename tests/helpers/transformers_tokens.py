"""What a model of transformers generates: the reference of parity tests."""

from __future__ import annotations

from typing import Any

import torch


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """By transformers' own ``generate``, with its own cache, one prompt at a time."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def logits_of_tokens(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of every generated token, in one pass over the whole sequence."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        output: torch.Tensor = model(ids, use_cache=False).logits[0].float()
    return output[len(prompt) - 1 : -1]
