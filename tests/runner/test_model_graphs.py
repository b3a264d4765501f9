"""What is captured of a model: which sizes warm up for others, and what a capture runs."""

from __future__ import annotations

from typing import Any

import pytest

from ostinato import (
    LLM,
    BatchDescriptor,
    CUDAGraphMode,
    GraphConfig,
    SamplingParams,
    get_forward_context,
)
from ostinato.attention.base import AttentionMetadata, AttentionSpec
from ostinato.graphs.policy.plan import PlanEntry
from ostinato.runner.input_buffers import InputBuffers
from ostinato.runner.model_graphs import kernels_of
from ostinato.runner.request_state import RequestState


def kernels(
    mode: CUDAGraphMode, num_tokens: int, num_ranks: int = 1, *, uniform: bool = False
) -> tuple[int, ...]:
    descriptor = BatchDescriptor(num_tokens, num_reqs=None, uniform=uniform)
    return kernels_of(num_ranks, PlanEntry(mode=mode, descriptor=descriptor))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_one_row_has_a_kernel_of_its_own_on_any_number_of_ranks(num_ranks: int) -> None:
    one, two = (kernels(CUDAGraphMode.PIECEWISE, rows * num_ranks, num_ranks) for rows in (1, 2))
    assert one != two


def test_ranks_that_split_a_batch_have_the_products_of_their_share() -> None:
    for rows in (1, 2, 16, 17, 64, 65, 128, 129, 256, 257, 512):
        alone = kernels(CUDAGraphMode.PIECEWISE, rows)
        assert kernels(CUDAGraphMode.PIECEWISE, 4 * rows, 4) == alone


def test_attention_has_all_tokens_whatever_a_ranks_share() -> None:
    for uniform in (True, False):
        one, two = (kernels(CUDAGraphMode.FULL, n, 3, uniform=uniform) for n in (15, 24))
        assert one != two
    full = CUDAGraphMode.FULL
    assert kernels(full, 17, uniform=True) == kernels(full, 32, uniform=True)


def test_large_mixed_batches_add_few_classes() -> None:
    """Each is a warm-up, and a size that prepares its kernels; 42 sizes have 3 above 1,024."""
    large = {kernels(CUDAGraphMode.FULL, size) for size in range(1152, 8193, 128)}
    assert len(large) == 3
    assert kernels(CUDAGraphMode.FULL, 320) != kernels(CUDAGraphMode.FULL, 384)


# --- what a capture runs --------------------------------------------------------------------------


def open_llm(mode: str, **options: Any) -> LLM:
    return LLM(
        "tiny",
        random_weights=True,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        kv_cache_memory_bytes="4M",
        graphs=GraphConfig(mode=mode, capture_sizes=[2, 4, 16], **options),
        show_progress=False,
    )


def watch_attention(llm: LLM) -> list[tuple[CUDAGraphMode, AttentionMetadata]]:
    """Each forward from now on by its first layer's attention: mode and batch."""
    seen: list[tuple[CUDAGraphMode, AttentionMetadata]] = []
    backend = llm.engine.runner.backend
    name = "forward_qkv" if hasattr(backend, "forward_qkv") else "forward"
    forward = getattr(backend, name)

    def watched(spec: AttentionSpec, *arguments: Any) -> None:
        if spec.layer == 0:
            context = get_forward_context()
            seen.append((context.cudagraph_runtime_mode, context.attn_metadata))
        forward(spec, *arguments)

    setattr(backend, name, watched)
    return seen


@pytest.mark.parametrize(
    ("mode", "num_warmups", "num_forwards"),
    [
        ("FULL_DECODE_ONLY", 0, 2),  # the sizes 2 and 4; their tokens are copied nowhere
        ("FULL_AND_PIECEWISE", 0, 5),
        ("FULL_AND_FULL", 0, 6),
        ("FULL", 0, 4),  # of the largest size first, whose output is the model for the buffers
    ],
)
def test_a_capture_runs_the_model_no_more_often_than_it_must(
    mode: str, num_warmups: int, num_forwards: int
) -> None:
    with open_llm(mode, num_warmups=num_warmups) as llm:
        runner = llm.engine.runner
        num_nodes = [runner.num_nodes(entry) for entry in runner.plan.entries]
        runner.graphs.clear_graphs()
        forwards = watch_attention(llm)
        runner.capture_model()
        assert len(forwards) == num_forwards
        assert [runner.num_nodes(entry) for entry in runner.plan.entries] == num_nodes


def test_a_decode_graph_ends_with_the_state_and_copies_nothing_after() -> None:
    """Its tokens are where the sampler wrote them, its logits where the head did."""
    with open_llm("FULL_DECODE_ONLY") as llm:
        runner = llm.engine.runner
        for entry in runner.plan.entries:
            output = runner.graphs.manager.run_fullgraph(entry.descriptor)
            size = entry.descriptor.num_tokens
            assert output.token_ids.data_ptr() == runner.buffers.sampled.data_ptr()
            assert output.logits.shape == (size, llm.engine.model.vocab_size)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_FULL"])
def test_a_whole_graph_of_a_mixed_batch_computes_its_inputs(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host sets the queries of a step, and nothing else of it runs eagerly before sampling."""
    prompts, params = [[1, 2, 3], [4], [5, 6]], SamplingParams(max_tokens=4, temperature=0)
    with open_llm("NONE") as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
    with open_llm(mode) as llm:
        monkeypatch.delattr(InputBuffers, "load")
        monkeypatch.delattr(RequestState, "advance")
        results = llm.generate(prompts, params)
        assert [result.outputs[0].token_ids for result in results] == expected
        assert llm.engine.runner.stats.misses == 0


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_FULL"])
def test_attention_is_told_which_batches_decode(mode: str) -> None:
    """A graph of mixed batches is captured with a token for each request, and replayed with any."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with open_llm(mode) as llm:
        runner = llm.engine.runner
        runner.graphs.clear_graphs()
        forwards = watch_attention(llm)
        runner.capture_model()
        for runtime_mode, batch in forwards:
            if runtime_mode is CUDAGraphMode.FULL:
                decodes = batch.seq_lens.shape[0] == batch.slot_mapping.shape[0]
                if mode != "FULL_AND_FULL" or not decodes:
                    assert batch.uniform_decode == (mode == "FULL_DECODE_ONLY")
        forwards.clear()
        llm.generate([[1, 2, 3], [4]], params)
        told = [batch.uniform_decode for _, batch in forwards]
        # Decode steps run no Python where they have a graph of their own, or of mixed batches.
        expected = 3 if mode in ("NONE", "PIECEWISE") else 0
        assert told == ([] if mode.endswith("FULL") else [False]) + [True] * expected
