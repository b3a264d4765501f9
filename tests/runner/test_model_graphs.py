"""Which sizes of a plan are taken to launch the same kernels, so that one warms up for all."""

from __future__ import annotations

import pytest

from ostinato import BatchDescriptor, CUDAGraphMode
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.runner.model_graphs import _kernels_of


def kernels(mode: CUDAGraphMode, num_tokens: int, num_ranks: int = 1) -> tuple[int, ...]:
    descriptor = BatchDescriptor(num_tokens, num_reqs=None, uniform=False)
    return _kernels_of(num_ranks, PlanEntry(mode=mode, descriptor=descriptor))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_one_row_has_a_kernel_of_its_own_on_any_number_of_ranks(num_ranks: int) -> None:
    one, two = (kernels(CUDAGraphMode.PIECEWISE, rows * num_ranks, num_ranks) for rows in (1, 2))
    assert one != two


def test_ranks_that_split_a_batch_have_the_products_of_their_share() -> None:
    for rows in (1, 2, 16, 17, 64, 65, 128, 129, 256, 257, 512):
        alone = kernels(CUDAGraphMode.PIECEWISE, rows)
        assert kernels(CUDAGraphMode.PIECEWISE, 4 * rows, 4) == alone


def test_attention_has_all_tokens_whatever_a_ranks_share() -> None:
    assert kernels(CUDAGraphMode.FULL, 15, 3) != kernels(CUDAGraphMode.FULL, 24, 3)
    assert kernels(CUDAGraphMode.FULL, 17) == kernels(CUDAGraphMode.FULL, 32)
