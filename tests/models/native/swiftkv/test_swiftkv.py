"""SwiftKV against a plain statement of it over transformers' parts, and against plain decoders.

The statement knows no pages, no batches and no selection: it runs every token of one request
through all layers. Tokens that skip the late layers must not show in any logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from paged_requests import Batch, PagedRequests, Piece
from safetensors.torch import save_file
from swiftkv_statement import Statement, untrained
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from ostinato import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphPool,
    set_forward_context,
)
from ostinato.attention.base import AttentionBackend
from ostinato.attention.reference import paged_cpu, paged_cuda
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.attention.selected import last_tokens, select_tokens
from ostinato.attention.triton_paged import TritonPagedAttention
from ostinato.compile.backend import compile_piecewise
from ostinato.errors import ConfigError, ModelLoadError
from ostinato.graphs.policy.counters import compilation_counter
from ostinato.models.checkpoint import Checkpoint
from ostinato.models.native.config.decoder_config import DecoderConfig
from ostinato.models.native.decoder import Decoder
from ostinato.models.native.swiftkv.config import SwiftKVConfig
from ostinato.models.native.swiftkv.decoder import SwiftKVDecoder, convert

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EARLY, LAYERS = 2, 5
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama, biases, tied": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral, window": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
# Prompts of unequal lengths, one in two chunks beside a decoding request, then all decode.
TOKENS = [[(7 * i + 29 * r + 3) % 97 for i in range(n)] for r, n in enumerate((14, 6, 9))]
STEPS = [
    [Piece(0, 0, 11), Piece(1, 0, 3), Piece(2, 0, 2)],
    [Piece(1, 3, 1), Piece(2, 2, 5)],
    [Piece(0, 11, 1), Piece(1, 4, 1), Piece(2, 7, 1)],
    [Piece(0, 12, 1), Piece(1, 5, 1), Piece(2, 8, 1)],
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


# --- models ---------------------------------------------------------------------------------------


def theirs(name: str, device: torch.device) -> Any:
    """transformers' model with weights that make every tensor matter."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(device)


def trained_weights(name: str, device: torch.device) -> dict[str, Tensor]:
    """A SwiftKV checkpoint as its training leaves it: new projections beside the teacher's."""
    weights = dict(theirs(name, device).state_dict())
    if CONFIGS[name].tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for index in range(EARLY, LAYERS):
        for kind in "qkv":
            module = f"model.layers.{index}.self_attn.{kind}_proj"
            for part in ("weight", "bias"):
                if f"{module}.{part}" in weights:
                    teacher = weights[f"{module}.{part}"]
                    student = teacher + 0.1 * torch.randn_like(teacher)
                    weights[f"{module}_swiftkv.{part}"] = student
    norm = weights["model.norm.weight"]
    weights["model.norm_swiftkv.weight"] = 1 + 0.2 * torch.randn_like(norm)
    return weights


def trained_model(name: str, weights: dict[str, Tensor], device: torch.device) -> SwiftKVDecoder:
    config = SwiftKVConfig(
        decoder=DecoderConfig.from_hf(CONFIGS[name]), num_key_value_layers=EARLY, trained=True
    )
    model = SwiftKVDecoder(config, device=device, dtype=torch.float32)
    for slot in model.weight_slots():
        slot.target.copy_(weights[slot.name])
    return model


def plain_decoder(name: str, device: torch.device) -> tuple[Decoder, Any]:
    reference = theirs(name, device)
    decoder = Decoder(DecoderConfig.from_hf(CONFIGS[name]), device=device, dtype=torch.float32)
    weights = reference.state_dict()
    for slot in decoder.weight_slots():
        slot.target.copy_(weights[slot.name])
    return decoder, reference


@torch.inference_mode()
def states_of(model: Any, batch: Batch) -> Tensor:
    with set_forward_context(attn_metadata=batch.metadata):
        hidden: Tensor = model.forward(batch.input_ids, batch.positions)
    return hidden


def rows_of(pieces: Sequence[Piece]) -> list[int]:
    """The last token of each piece."""
    rows, end = [], 0
    for piece in pieces:
        end += piece.count
        rows.append(end - 1)
    return rows


# --- against the statement ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_chunks_and_decode(name: str, device: torch.device) -> None:
    weights = trained_weights(name, device)
    model = trained_model(name, weights, device)
    stated = [Statement(CONFIGS[name], weights, EARLY).run(tokens) for tokens in TOKENS]
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    assert [spec.layer for spec in model.attention_specs] == list(range(LAYERS))
    assert stated[0].logits.std() > 1
    written = 0
    for step, pieces in enumerate(STEPS):
        num_tokens = sum(piece.count for piece in pieces)
        # Decode steps select all of their tokens, or say nothing.
        batch = requests.batch(
            pieces,
            padded_tokens=num_tokens + 3,
            padded_reqs=len(pieces) + 2,
            num_selected=None if step == 2 else len(pieces) + 4,
        )
        hidden = states_of(model, batch)
        assert hidden.shape == (num_tokens + 3, SIZES["hidden_size"])
        logits = model.compute_logits(hidden[rows_of(pieces)])
        expected = torch.stack([stated[p.request].logits[p.end - 1] for p in pieces])
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        written += num_tokens
        for layer in range(LAYERS):  # of all tokens, in late layers too, and of no other
            assert requests.num_written(layer) == written
            for piece in pieces:
                for mine, its in zip(
                    requests.stored(layer, piece), stated[piece.request].caches[layer], strict=True
                ):
                    torch.testing.assert_close(mine, its[piece.start : piece.end], **TOLERANCE)


def test_without_a_selection_all_tokens_have_logits(device: torch.device) -> None:
    weights = trained_weights("qwen3", device)
    model = trained_model("qwen3", weights, device)
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    pieces = [Piece(r, 0, len(tokens)) for r, tokens in enumerate(TOKENS)]
    logits = model.compute_logits(states_of(model, requests.batch(pieces)))
    statement = Statement(CONFIGS["qwen3"], weights, EARLY)
    expected = torch.cat([statement.run(tokens).logits for tokens in TOKENS])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", [TorchPagedAttention, TritonPagedAttention])
def test_several_tokens_of_one_request(kind: Any, device: torch.device) -> None:
    """As speculation needs them: each sees the keys up to its own."""
    if kind is TritonPagedAttention and device.type == "cpu":
        pytest.skip("needs a GPU")
    weights = trained_weights("mistral, window", device)
    model = trained_model("mistral, window", weights, device)
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    pieces = [Piece(1, 0, 6), Piece(0, 0, 14)]
    batch = requests.batch(pieces, padded_tokens=24, backend=kind())
    wanted = [13, 2, -1, 19, 5, 14, 22]  # 22 is a padding token, of no request
    indices = torch.tensor(wanted, device=device)
    batch.metadata = replace(batch.metadata, logits_indices=indices)
    hidden = states_of(model, batch)
    statement = Statement(CONFIGS["mistral, window"], weights, EARLY)
    expected = torch.cat([statement.run(TOKENS[r]).logits for r in (1, 0)])
    rows = [13, 2, 19, 5, 14]
    torch.testing.assert_close(model.compute_logits(hidden[rows]), expected[rows], **TOLERANCE)


# --- conversion ---------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_early", [LAYERS, LAYERS - 1])
def test_conversion_with_at_most_one_late_layer_is_the_original(
    name: str, num_early: int, device: torch.device
) -> None:
    decoder, reference = plain_decoder(name, device)
    model = convert(decoder, num_early)
    assert model.selects_tokens == (num_early < LAYERS)
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    for pieces in STEPS:
        batch = requests.batch(pieces, num_selected=len(pieces))
        logits = model.compute_logits(states_of(model, batch)[rows_of(pieces)])
        with torch.no_grad():
            expected = torch.stack(
                [
                    reference(torch.tensor([TOKENS[p.request][: p.end]], device=device)).logits[
                        0, -1
                    ]
                    for p in pieces
                ]
            )
        torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_conversion_with_more_late_layers_is_what_training_starts_from(
    device: torch.device,
) -> None:
    decoder, reference = plain_decoder("llama", device)
    weights = untrained(reference.state_dict(), EARLY, LAYERS)
    model = convert(decoder, EARLY)
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    pieces = STEPS[0]
    hidden = states_of(model, requests.batch(pieces, num_selected=3))
    logits = model.compute_logits(hidden[rows_of(pieces)])
    statement = Statement(CONFIGS["llama"], weights, EARLY)
    expected = torch.stack([statement.run(TOKENS[p.request][: p.end]).logits[-1] for p in pieces])
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    with torch.no_grad():  # and it is not the plain decoder
        plain = reference(torch.tensor([TOKENS[0][:11]], device=device)).logits[0, -1]
    assert (logits[0] - plain).abs().max() > 0.1


# --- what runs, and in which shapes -------------------------------------------------------------


def test_late_layers_see_only_the_selected_tokens(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_model("llama", trained_weights("llama", device), device)
    assert model.late is not None
    shapes: dict[int, list[int]] = {}
    layer_of = {
        module.weight.data_ptr(): layer.spec.layer
        for layer in model.late.late_layers()
        for module in (layer.o_proj, layer.gate_up_proj, layer.down_proj)
    }
    linear = F.linear

    def recording(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.data_ptr() in layer_of:
            shapes.setdefault(layer_of[weight.data_ptr()], []).append(x.shape[0])
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", recording)
    calls: list[tuple[int, int]] = []
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    batch = requests.batch(STEPS[0], padded_tokens=20, num_selected=4)
    inner = batch.metadata.backend

    class Recording(AttentionBackend):
        def forward(self, spec: Any, query: Tensor, *rest: Any) -> None:
            calls.append((spec.layer, query.shape[0]))
            inner.forward(spec, query, *rest)

    batch.metadata = replace(batch.metadata, backend=Recording())
    states_of(model, batch)
    early, late = range(EARLY), range(EARLY, LAYERS)
    assert calls == [(layer, 20) for layer in early] + [(layer, 4) for layer in late]
    assert shapes == {layer: [4] * 3 for layer in late}


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_a_graph_of_prompts_serves_other_prompts(
    mode: CUDAGraphMode, device: torch.device, pool: GraphPool
) -> None:
    weights = trained_weights("qwen2", device)
    model = trained_model("qwen2", weights, device)
    statement = Statement(CONFIGS["qwen2"], weights, EARLY)
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    padded = {"padded_tokens": 20, "padded_reqs": 4, "num_selected": 5}
    splits = [
        [Piece(0, 0, 11), Piece(1, 0, 3), Piece(2, 0, 2)],
        [Piece(1, 3, 1), Piece(2, 2, 5), Piece(0, 11, 3)],
        [Piece(1, 4, 2)],
    ]
    split_at_breaks = mode is CUDAGraphMode.PIECEWISE
    wrapper = CUDAGraphWrapper(model.forward, mode, pool=pool, split_at_breaks=split_at_breaks)
    key = BatchDescriptor(num_tokens=20, num_reqs=None if split_at_breaks else 4)
    static = requests.batch(splits[0], **padded)
    num_graphs = LAYERS + 1 if split_at_breaks else 1
    states_of(model, static)  # kernels are compiled before they are captured
    with torch.inference_mode(), compilation_counter.expect(num_cudagraph_captured=num_graphs):
        for pieces in splits:
            static.refill(requests.batch(pieces, **padded))
            with set_forward_context(mode, key, attn_metadata=static.metadata):
                hidden = wrapper(static.input_ids, static.positions)
            logits = model.compute_logits(hidden[rows_of(pieces)])
            expected = [statement.run(TOKENS[p.request][: p.end]).logits[-1] for p in pieces]
            torch.testing.assert_close(logits, torch.stack(expected), **TOLERANCE)


@pytest.mark.slow
def test_compiled_models_run_all_tokens(device: torch.device, pool: GraphPool) -> None:
    weights = trained_weights("llama", device)
    model = trained_model("llama", weights, device)
    requests = PagedRequests(model.attention_specs, TOKENS, device=device)
    compiled = compile_piecewise(model.forward, pool=pool, compiler="eager")
    batch = requests.batch(STEPS[0], num_selected=3)
    with torch.inference_mode(), set_forward_context(attn_metadata=batch.metadata):
        logits = model.compute_logits(compiled(batch.input_ids, batch.positions))
    statement = Statement(CONFIGS["llama"], weights, EARLY)
    expected = torch.cat([statement.run(TOKENS[p.request][: p.end]).logits for p in STEPS[0]])
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama, biases, tied", "qwen3"])
def test_fused_layers_are_the_plain_ones(name: str, device: torch.device) -> None:
    weights = trained_weights(name, device)
    model = trained_model(name, weights, device)
    assert model.late is not None
    logits = []
    for fused in (True, False):
        model.late._fused = fused
        requests = PagedRequests(model.attention_specs, TOKENS, device=device)
        logits.append(
            [model.compute_logits(states_of(model, requests.batch(step))) for step in STEPS]
        )
    for mine, plain in zip(*logits, strict=True):
        torch.testing.assert_close(mine, plain, **TOLERANCE)


# --- the parts ----------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6),
    data=st.data(),
)
def test_selected_tokens_are_requests_of_one_token(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    starts = [0]
    for query_len, _ in lengths:
        starts.append(starts[-1] + query_len)
    num_tokens = starts[-1] + data.draw(st.integers(0, 3))
    chosen = data.draw(st.lists(st.integers(0, max(0, num_tokens - 1)), unique=True, max_size=6))
    indices = data.draw(st.permutations([*chosen, -1, -1]))
    table = torch.arange(3 * len(lengths), dtype=torch.int32).view(-1, 3)
    metadata: Any = SimpleNamespace(
        logits_indices=torch.tensor(indices),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([q + context if q else 0 for q, context in lengths]).int(),
        block_table=table,
    )
    selected = select_tokens(metadata, num_tokens)
    assert selected is not None
    owners = [r for r, (query_len, _) in enumerate(lengths) for _ in range(query_len)]
    for row, index in enumerate(indices):
        if not 0 <= index < len(owners):
            assert selected.targets[row] == num_tokens
            assert selected.seq_lens[row] == 0
            continue
        request = owners[index]
        assert selected.rows[row] == selected.targets[row] == index
        assert selected.seq_lens[row] == lengths[request][1] + index - starts[request] + 1
        assert torch.equal(selected.block_table[row], table[request])
    assert selected.query_start_loc.tolist() == list(range(len(indices) + 1))
    assert (selected.slot_mapping == -1).all()
    types = {selected.query_start_loc.dtype, selected.seq_lens.dtype, selected.block_table.dtype}
    assert types == {torch.int32}
    if num_tokens:
        tokens = torch.randn(num_tokens, 2)
        new = torch.randn(len(indices), 2)
        put = selected.put_back(new, tokens)
        for index in range(num_tokens):
            owned = index in indices and index < len(owners)
            assert torch.equal(put[index], new[indices.index(index)] if owned else tokens[index])


def test_last_tokens() -> None:
    starts = torch.tensor([0, 3, 3, 4, 9, 9], dtype=torch.int32)
    out = torch.full((7,), 55)
    assert last_tokens(starts, out) is out
    assert out.tolist() == [2, -1, 3, 8, -1, -1, -1]


@pytest.mark.parametrize("body", [paged_cpu.store_kv_cpu, paged_cuda.store_kv_cuda])
def test_keys_and_values_are_stored(body: Any, device: torch.device) -> None:
    if device.type == "cuda" and body is paged_cpu.store_kv_cpu:
        pytest.skip("reads the slots on the host")
    slots = torch.tensor([5, -1, 2, 11, -1], device=device)
    # Strided, as slices of a GEMM's result are; NaN for padding.
    both = torch.randn(5, 4, 3, device=device)
    both[slots < 0] = float("nan")
    key, value = both.split(2, dim=1)
    caches = [torch.zeros(3, 4, 2, 3, device=device) for _ in range(2)]
    body(key, value, *caches, slots)
    for rows, cache in zip((key, value), caches, strict=True):
        expected = torch.zeros(12, 2, 3, device=device)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[row]
        assert torch.equal(cache.flatten(0, 1), expected)


# --- configs and checkpoints --------------------------------------------------------------------

# As the published models have it, in transformers' old style.
FIELDS: dict[str, Any] = {
    **SIZES,
    "model_type": "llama_swiftkv",
    "architectures": ["LlamaSwiftKVForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
        "rope_type": "llama3",
    },
    "num_key_value_layers": 2,
    "key_value_group_size": 1,
    "tie_word_embeddings": False,
}


def test_a_published_config() -> None:
    config = SwiftKVConfig.from_fields(FIELDS)
    assert config.trained
    assert list(config.late_layers) == [2, 3, 4]
    assert config.early.num_layers == 2
    own = ("num_key_value_layers", "key_value_group_size", "architectures", "model_type")
    plain = {name: value for name, value in FIELDS.items() if name not in own}
    assert config.decoder == DecoderConfig.from_hf(AutoConfig.for_model("llama", **plain))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "ends in '_swiftkv'; this is 'llama'"),
        ({"model_type": "nobody_swiftkv"}, "'nobody_swiftkv': SwiftKV of an unknown family"),
        ({"model_type": "gpt2_swiftkv"}, "its model_type is 'gpt2'"),
        ({"key_value_group_size": 4}, r"key_value_group_size is 4.*AcrossKV.*in which it is 1"),
        ({"num_key_value_layers": 6}, "from 1 to the model's 5 layers, got 6"),
        ({"num_key_value_layers": -1}, "got -1"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SwiftKVConfig.from_fields({**FIELDS, **changes})


def test_checkpoints_of_both_kinds(tmp_path: Path) -> None:
    """A trained one, with or without the teacher's projections, and a plain decoder's."""
    cpu = torch.device("cpu")
    weights = trained_weights("llama, biases, tied", cpu)
    model = trained_model("llama, biases, tied", weights, cpu)
    teacher = model.ignored_names()
    assert len(teacher) == (LAYERS - EARLY) * 6
    assert set(teacher) < set(weights)
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check(model.weight_slots(), ignored=teacher)
    with pytest.raises(ModelLoadError, match="which this architecture does not use"):
        checkpoint.check(model.weight_slots())

    decoder, _ = plain_decoder("llama, biases, tied", cpu)
    plain = {slot.name: slot.target.contiguous() for slot in decoder.weight_slots()}
    save_file(plain, tmp_path / "model.safetensors")
    config = SwiftKVConfig(decoder=decoder.config, num_key_value_layers=EARLY)
    loaded = SwiftKVDecoder(config, device=cpu, dtype=torch.float32)
    assert loaded.ignored_names() == []
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check(loaded.weight_slots())
    checkpoint.copy_into(loaded.weight_slots(), cpu, show_progress=False)
    converted = convert(decoder, EARLY).state_dict()
    assert loaded.state_dict().keys() == converted.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, converted[name]), name
