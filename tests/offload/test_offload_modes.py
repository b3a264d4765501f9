"""With layers in host memory, tokens are those of transformers: in every mode and every order.

Between steps, all slots are filled with NaN: a forward must copy all it reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deep_models import NEW_TOKENS, NUM_LAYERS, deep_model, deep_tokens, poison, prompts

from ostinato import (
    LLM,
    CUDAGraphMode,
    GraphConfig,
    OffloadConfig,
    SamplingParams,
    get_forward_context,
)
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.graphs.policy.modes import ModeName
from ostinato.models.native.decoder import Decoder
from ostinato.offload.prefetch import LayerCopy

MODES: tuple[ModeName, ...] = (
    *("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL_AND_FULL"),
)
# group, offloaded, prefetch; the last two: all layers, and neighbours in one slot.
LAYERS = [(2, 1, 1), (3, 2, 2), (6, 5, 3), (1, 1, 1), (3, 2, 1)]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def open_llm(device: torch.device, mode: ModeName, model: Any = None, **options: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": str(device),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,  # the longest prompt does not fit beside the others
        "max_model_len": 64,
        "kv_cache_memory_bytes": "2M",
        "enable_prefix_caching": False,
        "show_progress": False,
        "offload": OffloadConfig(group=2, offloaded=1, prefetch=1),
        # Some batches are above the largest size, and run eagerly.
        "graphs": GraphConfig(
            mode=mode, capture_sizes=None if mode == "NONE" else [1, 2, 4, 16], num_warmups=1
        ),
    }
    return LLM(model or deep_model(), **{**defaults, **options})


def tokens_of(llm: LLM, asked: list[list[int]], **options: Any) -> list[list[int]]:
    """Greedy tokens, with all slots poisoned before every step."""
    tokens: list[list[int]] = [[] for _ in asked]
    poison(llm)
    for delta in llm.stream(asked, GREEDY, **options):
        tokens[delta.prompt_index] += delta.token_ids
        poison(llm)
    return tokens


def addresses(llm: LLM) -> dict[str, int]:
    model = llm.engine.model
    assert isinstance(model, Decoder)
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_tokens_and_addresses_in_every_mode(mode: ModeName, device: torch.device) -> None:
    """Batches of one to four prompts, in a random order, so that graphs of all sizes alternate."""
    wanted = deep_tokens()
    with open_llm(device, mode) as llm:
        before = addresses(llm)
        order = random.Random(mode)
        for _ in range(4):
            chosen = order.sample(range(4), order.randint(1, 4))
            got = tokens_of(llm, [prompts()[each] for each in chosen])
            assert got == [wanted[each] for each in chosen]
        assert addresses(llm) == before
        if mode != "NONE":
            assert sum(llm.engine.runner.stats.replays.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS[1:], ids=str)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_any_choice_of_layers(
    layers: tuple[int, int, int], mode: ModeName, device: torch.device
) -> None:
    group, offloaded, prefetch = layers
    offload = OffloadConfig(group=group, offloaded=offloaded, prefetch=prefetch)
    with open_llm(device, mode, offload=offload) as llm:
        assert tokens_of(llm, prompts()) == deep_tokens()
        # Layers of a slot have the same addresses, and there are as many slots as promised.
        first = {a for name, a in addresses(llm).items() if name.endswith("qkv_proj.weight")}
        count = len(offload.layers_of(NUM_LAYERS))
        assert len(first) == NUM_LAYERS - count + prefetch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3_rope", "gemma2", "glm4"])
def test_families(name: str, device: torch.device) -> None:
    """Tied embeddings; float32 norms among other weights, and windows; biases."""
    offload = OffloadConfig(group=3, offloaded=2, prefetch=1)
    with open_llm(device, "FULL_AND_PIECEWISE", deep_model(name), offload=offload) as llm:
        assert tokens_of(llm, prompts()) == deep_tokens(name)


@pytest.mark.sweep
@pytest.mark.parametrize("layers", [(2, 1, 1), (6, 5, 3), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_a_copy_may_take_any_time(
    layers: tuple[int, int, int], mode: ModeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a stream of its own: from its start until it is waited for, the slot is undefined."""
    copy = LayerCopy.start

    def start(self: LayerCopy) -> None:
        self.slot.fill_(0xFF)

    monkeypatch.setattr(LayerCopy, "start", start)
    monkeypatch.setattr(LayerCopy, "wait", copy)
    group, offloaded, prefetch = layers
    offload = OffloadConfig(group=group, offloaded=offloaded, prefetch=prefetch)
    with open_llm(torch.device("cpu"), mode, offload=offload) as llm:
        assert tokens_of(llm, prompts()) == deep_tokens()


def test_copies_are_between_pieces(device: torch.device) -> None:
    """A copy that began in one piece and was waited for in another would break both captures.

    Beside attention, there are breaks where the first copy starts, before each of three offloaded
    layers, and after all of these but the last.
    """
    sizes = GraphConfig(mode="PIECEWISE", capture_sizes=[4])
    with open_llm(device, "PIECEWISE", graphs=sizes) as llm:
        (entry,) = llm.engine.runner.capture_report.entries
        assert entry.num_graphs == 1 + NUM_LAYERS + 1 + 3 + 2


@pytest.mark.slow
def test_two_engines_at_once(device: torch.device) -> None:
    """They take turns, step by step, with different weights in different slots."""
    first = open_llm(device, "FULL_AND_PIECEWISE")
    other = OffloadConfig(group=1, offloaded=1, prefetch=2)
    second = open_llm(device, "FULL_AND_FULL", deep_model(seed=1), offload=other)
    with first, second:
        streams = [llm.stream(prompts(), GREEDY) for llm in (first, second)]
        tokens: list[list[list[int]]] = [[[] for _ in prompts()] for _ in streams]
        open_streams = {0, 1}
        while open_streams:
            for each in sorted(open_streams):
                delta = next(streams[each], None)
                if delta is None:
                    open_streams.remove(each)
                else:
                    tokens[each][delta.prompt_index] += delta.token_ids
    assert tokens == [deep_tokens(), deep_tokens(seed=1)]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(2, 1, 1), (1, 1, 1)], ids=str)
def test_a_layer_reads_no_weights_after_it_has_returned(
    layers: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels of small batches on CUDA run a layer's last GEMM in the next layer, if they may.

    Here they run in torch.
    """
    monkeypatch.setattr(Decoder, "_runs_fused", lambda self, hidden: True)
    group, offloaded, prefetch = layers
    offload = OffloadConfig(group=group, offloaded=offloaded, prefetch=prefetch)
    tokens = []
    for each in (None, offload):
        with open_llm(
            torch.device("cpu"), "FULL_DECODE_ONLY", dtype="bfloat16", offload=each
        ) as llm:
            outputs = llm.generate(prompts(), GREEDY)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, after: int, *, in_graphs: bool) -> Iterator[None]:
    """The attention of a layer raises, once, after this many calls in graphs, or in eager steps."""
    attend, calls = TorchPagedAttention.attend, iter(range(10**6))

    def attend_or_fail(*args: Any) -> None:
        eager = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.NONE
        if eager is not in_graphs and next(calls) == after:
            raise RuntimeError("attention failed")
        attend(*args)

    with monkeypatch.context() as patched:
        patched.setattr(TorchPagedAttention, "attend", attend_or_fail)
        yield


def test_a_step_that_fails_loses_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in the middle of the layers; the next steps are right, eager and replayed."""
    for mode in ("NONE", "FULL_DECODE_ONLY"):
        with open_llm(device, mode, attention="torch") as llm:
            with (
                failing(monkeypatch, after=NUM_LAYERS // 2, in_graphs=False),
                pytest.raises(RuntimeError, match="attention failed"),
            ):
                llm.generate(prompts(), GREEDY)
            assert tokens_of(llm, prompts()) == deep_tokens()


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_a_capture_that_fails_leaves_the_others_usable(
    mode: ModeName, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 16], eager_fallback=True)
    with failing(monkeypatch, after=NUM_LAYERS + 2, in_graphs=True):
        llm = open_llm(device, mode, attention="torch", graphs=sizes)
    with llm:
        errors = [each.error for each in llm.engine.runner.capture_report.entries]
        assert sum("attention failed" in (error or "") for error in errors) == 1
        assert tokens_of(llm, prompts()) == deep_tokens()
        assert sum(llm.engine.runner.stats.replays.values()) > 0
