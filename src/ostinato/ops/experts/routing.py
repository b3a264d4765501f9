"""Which experts a token goes to, and with which weights: the torch reference, for every device.

A router gives each token one logit per expert. Their scores are a softmax over all experts, or a
sigmoid of each (GLM-4-MoE, DeepSeek-V3). The ``top_k`` experts with the largest scores run, and
their outputs are added up, weighted by the scores. Softmax scores that are renormalized are the
same as a softmax of the chosen logits alone (GPT-OSS).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Scoring = Literal["softmax", "sigmoid"]
NO_EXPERT = -1  # of padding

# Logits beyond these count as these, so that a token with a NaN still chooses distinct experts.
_LARGEST = 3.0e38


class RouterOptions(NamedTuple):
    """How logits become a choice.

    ``renormalize``: weights of a token add up to 1, before they are multiplied by ``scale``. With
    groups, experts of the ``top_groups`` groups alone can be chosen, those whose ``group_best``
    best experts have the largest sum: 1 (DeepSeek-V2) or 2.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_best: int = 2


class Routing(NamedTuple):
    """``experts`` [T, top_k] int64, ``NO_EXPERT`` for padding; ``weights`` [T, top_k] float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def route(
    logits: torch.Tensor,
    options: RouterOptions,
    *,
    correction: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> Routing:
    """Choose experts for tokens with these ``logits`` [T, E].

    ``correction`` [E] is added to the scores for the choice, but not to the weights. ``slots`` [T]:
    tokens with a negative one are padding, and choose none. Reads nothing back to the host.
    """
    logits = logits.float().nan_to_num(-_LARGEST, _LARGEST, -_LARGEST)
    scores = logits.softmax(1) if options.scoring == "softmax" else logits.sigmoid()
    choice = logits if options.scoring == "softmax" else scores
    if correction is not None:
        choice = scores + correction
    if options.num_groups > options.top_groups:
        choice = _in_best_groups(choice, options)
    experts = choice.topk(options.top_k, dim=1).indices
    weights = scores.gather(1, experts)
    if options.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    if options.scale != 1.0:
        weights = weights * options.scale
    if slots is not None:
        padding = (slots < 0).unsqueeze(1)
        experts = experts.masked_fill(padding, NO_EXPERT)
        weights = weights.masked_fill(padding, 0.0)
    return Routing(experts, weights)


def _in_best_groups(choice: torch.Tensor, options: RouterOptions) -> torch.Tensor:
    """``choice`` with all experts outside of the best groups at the bottom."""
    groups = choice.unflatten(1, (options.num_groups, -1))
    best = groups.topk(min(options.group_best, groups.shape[2]), dim=2).values.sum(2)
    kept = best.topk(options.top_groups, dim=1).indices
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
    kept_only: torch.Tensor = groups.masked_fill(dropped.unsqueeze(2), -_LARGEST)
    return kept_only.flatten(1)
