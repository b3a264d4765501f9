"""The ledger of an ``LLM``: all memory has a name, and updates check it by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato import LLM, GraphConfig, MemoryKind, SamplingParams, StaleGraphError

PROMPTS = [[1, 2, 3], [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(params=["FULL_AND_PIECEWISE", "FULL"])
def llm(device: torch.device, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        "tiny",
        random_weights=True,
        device=str(device),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        kv_cache_memory_bytes="16M",
        show_progress=False,
        graphs=GraphConfig(mode=request.param, capture_sizes=[2, 4]),
    ) as llm:
        yield llm


def weight_of(llm: LLM) -> torch.nn.Parameter:
    return dict(llm.engine.model.named_parameters())["layers.1.o_proj.weight"]  # type: ignore[attr-defined]


def test_all_memory_has_an_owner(llm: LLM) -> None:
    with_filter = SamplingParams(max_tokens=6, top_p=0.5)
    for _ in range(2):  # captures the sampler of decode graphs, if there are any
        llm.generate(PROMPTS, with_filter)
    ledger = llm.ledger()
    records = ledger.graphs()
    names = {each.name for graph in records for node in graph.nodes for each in node.addresses}
    assert {"layers.1.o_proj.weight", "layer 1, keys", "req_indices"} <= names
    counts = ledger.count()
    assert counts[MemoryKind.PARAMETER] >= 13 * 2
    if llm.engine.runner.pool.device.type == "cpu":
        assert counts[MemoryKind.UNKNOWN] == 0
    ledger.check(thorough=True)


def test_an_update_in_place_keeps_graphs_and_a_moved_weight_is_refused(llm: LLM) -> None:
    before = llm.generate(PROMPTS, GREEDY)
    weight = weight_of(llm)
    name, values = "model.layers.1.self_attn.o_proj.weight", weight.data.clone()
    llm.update_weights({name: values})
    assert [r.outputs[0].token_ids for r in llm.generate(PROMPTS, GREEDY)] == [
        r.outputs[0].token_ids for r in before
    ]
    old = weight.data
    weight.data = old.clone()
    with pytest.raises(StaleGraphError, match=r"parameter 'layers\.1\.o_proj\.weight' at 0x"):
        llm.update_weights({name: values})
    with pytest.raises(StaleGraphError, match=r"1 graph holds addresses .* is now at 0x"):
        llm.generate(PROMPTS, GREEDY)
    weight.data = old
    llm.update_weights({name: values})
    assert len(llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    llm.ledger().check()


def test_a_moved_kv_cache_is_named_by_layer(llm: LLM) -> None:
    layers: list[Any] = llm.engine.runner.kv_cache.layers
    keys, values = layers[1]
    layers[1] = keys.clone(), values
    owners = {each.owner for each in llm.ledger().stale()}
    assert owners == {"KV cache 'layer 1, keys'"}
    layers[1] = keys, values
    assert llm.ledger().stale() == []
