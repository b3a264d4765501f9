"""The request of test_sharded_decoder, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_steps import RankResult, config_of, run_request
from test_sharded_decoder import STEPS, TOKENS
from transformers import AutoModelForCausalLM
from workers import GlooPool

from ostinato.parallel.comm import Comm
from ostinato.parallel.distributed import DistributedComm
from ostinato.parallel.layout import ParallelLayout

pytestmark = pytest.mark.slow


def run_rank(sp: int, tp: int, path: str) -> RankResult:
    """On one process of a world of sp x tp."""
    layout, rank = ParallelLayout(sp, tp), dist.get_rank()
    # All ranks create the groups together, in one order; each requests its own.
    made: dict[tuple[int, ...], Comm] = {}
    for group in (layout.tensor_group(rank), layout.sequence_group(rank), layout.shift_group):
        if group not in made:
            made[group] = DistributedComm(group, torch.device("cpu"))
    alone = (rank,)
    if alone not in made:
        made[alone] = DistributedComm(alone, torch.device("cpu"))
    return run_request(rank, layout, lambda ranks: made[tuple(ranks)], path, TOKENS, STEPS)


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize(("sp", "tp"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_logits_equal_transformers(
    gloo_pool: GlooPool, tmp_path: Path, sp: int, tp: int, num_kv_heads: int
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config_of("qwen3", num_kv_heads), attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    results = gloo_pool.run(run_rank, sp, tp, str(tmp_path), world_size=sp * tp)
    assert len(results) == sp * tp
    for result in results:
        torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=1e-4)
