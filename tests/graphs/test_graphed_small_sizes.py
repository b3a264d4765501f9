"""``graphed()`` whose largest size is 1 or 2: what depends on the batch is still seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import graphed

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: x * 2 + 1,
    "two of them": lambda x: (x + 1, x.sum(1)),
    "rows in the second dimension": lambda x: (x * 2).T,
    "two rows each": lambda x: torch.stack([x, -x], dim=1).flatten(0, 1),
    "a matrix of two columns": lambda x: x[:, :2] * 3,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sizes", [[2], [1, 2], [1]], ids=str)
def test_results_are_those_of_the_function(
    device: torch.device, name: str, sizes: list[int]
) -> None:
    function = FUNCTIONS[name]
    with graphed(function, sizes=sizes) as fast:
        for rows in (2, 1, 2, 1, 3):
            x = torch.randn(rows, 4, device=device)
            expected, got = function(x), fast(x)
            for left, right in zip(
                expected if isinstance(expected, tuple) else (expected,),
                got if isinstance(got, tuple) else (got,),
                strict=True,
            ):
                assert torch.equal(left, right)
        small = sum(rows <= max(sizes) for rows in (2, 1, 2, 1, 3))
        assert fast.stats().hits == small
