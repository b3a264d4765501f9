"""Several streams: two engines or pools at once, and one pool on one stream after the other.

Nothing is synchronised that a user would not synchronise.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, GraphConfig, GraphPool, SamplingParams, graphed
from ostinato.attention.triton.tile_config import BatchShape, decode_tile_config
from ostinato.errors import CaptureError
from ostinato.ops.gemm.linear import Gemm, run_kernel
from ostinato.ops.gemm.tile_config import LinearShape, TileConfig, default_choice, gpu_of
from ostinato.ops.triton.counters import take_counters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = torch.device("cuda", 0)
HIDDEN, INTERMEDIATE = 512, 4096
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_MODEL_LEN = 8, 2, 64, 512
NUM_REQS, NEW_TOKENS = 12, 64


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Each call in a thread and on a stream of its own; what they returned, once all are done."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []
    ready = threading.Barrier(len(calls))

    def run(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                ready.wait()
                results[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# --- engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small models with different weights."""
    paths = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=1000,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=6,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        paths.append(tmp_path_factory.mktemp(f"llama{seed}"))
        model.save_pretrained(paths[-1])
    return paths


def open_llm(path: Path, **settings: Any) -> LLM:
    options = {
        "dtype": "float32",
        "graphs": GraphConfig(capture_sizes=[1, 2, 4, 8, 16, 64]),
        # Or a second run would have other batches, and other rounding.
        "enable_prefix_caching": False,
        **settings,
    }
    return LLM(
        path,
        device="cuda",
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes="64M",
        show_progress=False,
        **options,
    )


def prompts_for(engine: int) -> list[list[int]]:
    lengths = [20 + 13 * i for i in range(NUM_REQS)]
    return [
        [(engine * 71 + i * 37 + j * 11) % 1000 for j in range(n)] for i, n in enumerate(lengths)
    ]


def params_for(engine: int) -> list[SamplingParams]:
    """Greedy, random, and through the full sampler."""
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": engine},
        {"temperature": 0.8, "seed": engine, "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    return [SamplingParams(**common, **kinds[i % 3]) for i in range(NUM_REQS)]


def tokens_of(llm: LLM, engine: int) -> list[list[int]]:
    results = llm.generate(prompts_for(engine), params_for(engine))
    return [result.outputs[0].token_ids for result in results]


def assert_launches_are_split(dtype: torch.dtype) -> None:
    """Otherwise the tests below would show nothing about counters."""
    shape = BatchShape(
        num_tokens=16,
        num_reqs=16,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        row_bytes=HEAD_DIM * dtype.itemsize,
        itemsize=dtype.itemsize,
        max_keys=MAX_MODEL_LEN,
        num_sms=torch.cuda.get_device_properties(CUDA).multi_processor_count,
    )
    assert decode_tile_config(shape).num_splits > 1
    if dtype.itemsize == 2:  # float32 GEMMs are cuBLAS's
        down = LinearShape(16, HIDDEN, INTERMEDIATE, dtype, residual=True)
        choice = default_choice(down, gpu_of(CUDA))
        assert isinstance(choice, TileConfig)
        assert choice.split_k > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_engines_at_once_say_what_each_says_alone(
    checkpoints: list[Path], dtype: torch.dtype
) -> None:
    """In bfloat16 too: the same requests make the same batches, and these are rounded alike."""
    assert_launches_are_split(dtype)
    name = str(dtype).removeprefix("torch.")
    with open_llm(checkpoints[0], dtype=name) as first, open_llm(checkpoints[1], dtype=name) as two:
        alone = [tokens_of(first, 0), tokens_of(two, 1)]
        assert alone[0] != alone[1]
        for _ in range(4):
            both = at_once(lambda: tokens_of(first, 0), lambda: tokens_of(two, 1))
            assert both == alone
        assert [tokens_of(first, 0), tokens_of(two, 1)] == alone  # nothing was left dirty


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_two_engines_at_once_in_every_mode(checkpoints: list[Path], mode: str) -> None:
    sizes = None if mode == "NONE" else [1, 2, 4, 8, 16, 64]
    graphs = GraphConfig(mode=mode, capture_sizes=sizes)
    with (
        open_llm(checkpoints[0], graphs=graphs) as first,
        open_llm(checkpoints[1]) as second,
    ):
        alone = [tokens_of(first, 0), tokens_of(second, 1)]
        assert at_once(lambda: tokens_of(first, 0), lambda: tokens_of(second, 1)) == alone


def test_engines_are_built_in_two_threads_at_once(checkpoints: list[Path]) -> None:
    """Each captures while the other allocates, captures, runs or closes."""

    def build_and_run(engine: int) -> list[list[list[int]]]:
        answers = []
        for _ in range(2):
            with open_llm(checkpoints[engine]) as llm:
                answers.append(tokens_of(llm, engine))
        return answers

    at = at_once(lambda: build_and_run(0), lambda: build_and_run(1))
    for engine, answers in enumerate(at):
        with open_llm(checkpoints[engine]) as llm:
            assert answers == [tokens_of(llm, engine)] * 2


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_an_engine_that_changes_streams_at_every_step(checkpoints: list[Path], mode: str) -> None:
    sizes = None if mode == "NONE" else [1, 2, 4, 8, 16, 64]
    graphs = GraphConfig(mode=mode, capture_sizes=sizes)
    streams = [torch.cuda.current_stream(CUDA), *(torch.cuda.Stream(CUDA) for _ in range(2))]
    with open_llm(checkpoints[0], graphs=graphs) as llm:
        engine = llm.engine
        pairs = zip(prompts_for(0), params_for(0), strict=True)
        completions = [engine.prepare_request(prompt, params)[0] for prompt, params in pairs]
        for completion in completions:
            engine.add(completion)
        step = 0
        while engine.has_unfinished:
            with torch.cuda.stream(streams[step % 3]):
                engine.step()
            step += 1
        assert [completion.output.token_ids for completion in completions] == tokens_of(llm, 0)


# --- pools ----------------------------------------------------------------------------------------


@pytest.fixture
def pools() -> Iterator[list[GraphPool]]:
    with ExitStack() as stack:
        yield [stack.enter_context(GraphPool(CUDA, lazy_capture=True)) for _ in range(2)]


# Few rows and columns, a long inner dimension: cuBLAS splits these along it.
SPLIT_K = [(8, 64, 16384), (16, 128, 8192), (1, 256, 32768), (64, 64, 16384)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "inner"), SPLIT_K)
def test_two_graphs_of_split_gemms_at_once(
    rows: int, columns: int, inner: int, dtype: torch.dtype
) -> None:
    """Their partial sums are in cuBLAS's workspace, which each pool has for itself."""
    torch.manual_seed(0)
    num_gemms = 24

    def build() -> Callable[[torch.Tensor], torch.Tensor]:
        weights = torch.randn(num_gemms, inner, columns, device=CUDA).to(dtype)
        bias = torch.randn(columns, device=CUDA).to(dtype)

        def chain(x: torch.Tensor) -> torch.Tensor:
            plain = torch.stack([x @ weight for weight in weights], dim=1)
            return plain + torch.stack([torch.addmm(bias, x, weight) for weight in weights], dim=1)

        return chain

    inputs = [torch.randn(rows, inner, device=CUDA).to(dtype) for _ in range(2)]
    streams = [torch.cuda.Stream(CUDA) for _ in range(2)]
    with graphed(build(), sizes=[rows]) as first, graphed(build(), sizes=[rows]) as second:
        both = (first, second)
        alone = [fast(x).clone() for fast, x in zip(both, inputs, strict=True)]
        torch.cuda.synchronize()
        for _ in range(30):
            outputs = []
            for fast, x, stream in zip(both, inputs, streams, strict=True):
                with torch.cuda.stream(stream):
                    outputs.append(fast(x).clone())
            torch.cuda.synchronize()
            for out, wanted in zip(outputs, alone, strict=True):
                assert torch.equal(out, wanted)


def stream_of(pool: GraphPool) -> int:
    """The stream that the pool captures on."""
    seen: list[int] = []
    x = torch.ones(4, device=CUDA)

    def forward() -> torch.Tensor:
        seen.append(torch.cuda.current_stream(CUDA).cuda_stream)
        return x * 2

    pool.capture(forward)
    return seen[0]


def test_pools_that_live_together_capture_on_streams_of_their_own(pools: list[GraphPool]) -> None:
    ours = {stream_of(pool) for pool in pools}
    assert len(ours) == 2
    assert all({stream_of(pool)} <= ours for pool in pools)  # and keep them
    handed_out = {torch.cuda.Stream(CUDA).cuda_stream for _ in range(100)}
    assert not ours & handed_out


def test_a_stream_is_used_again_once_pool_and_graphs_are_gone() -> None:
    """Each has a workspace of 32 MiB, so there are as many as pools at a time, and no more."""
    gc.collect()
    pool = GraphPool(CUDA, lazy_capture=True)
    stream = stream_of(pool)
    x = torch.ones(4, device=CUDA)
    tape = pool.capture(lambda: x * 2).tape
    pool.close()
    with GraphPool(CUDA, lazy_capture=True) as other:
        assert stream_of(other) != stream  # the tape might be replayed
    del tape
    gc.collect()
    seen = set()
    for _ in range(4):
        with GraphPool(CUDA, lazy_capture=True) as other:
            seen.add(stream_of(other))
    assert len(seen) == 1
    kept = [GraphPool(CUDA, lazy_capture=True) for _ in range(8)]
    assert stream in {stream_of(other) for other in kept}
    for other in kept:
        other.close()


def test_a_pool_on_one_stream_after_the_other(pools: list[GraphPool]) -> None:
    """The graph is slow to read its input, so a step that does not wait overwrites it."""
    pool = pools[0]
    x = torch.zeros(1 << 16, device=CUDA)

    def forward() -> torch.Tensor:
        torch.cuda._sleep(200_000)
        y = x * 2
        torch.cuda._sleep(200_000)
        return y

    captured = pool.capture(forward)
    streams = [torch.cuda.current_stream(CUDA), *(torch.cuda.Stream(CUDA) for _ in range(3))]
    results = []
    for step in range(60):
        with torch.cuda.stream(streams[step * 7 % 4]):
            moved = pool.follow_stream()
            assert moved == (step > 0 and step * 7 % 4 != (step - 1) * 7 % 4)
            assert not pool.follow_stream()
            x.fill_(step)
            pool.replay(captured.tape)
            results.append(captured.output.clone())
    torch.cuda.synchronize()
    for step, result in enumerate(results):
        assert (result == 2 * step).all()


def test_replays_and_captures_follow_the_stream_by_themselves(pools: list[GraphPool]) -> None:
    pool = pools[0]
    total = torch.zeros(1 << 16, device=CUDA)

    def add() -> None:
        before = total.clone()
        torch.cuda._sleep(200_000)
        total.copy_(before + 1)

    tapes = [pool.capture(add).tape]
    streams = [torch.cuda.Stream(CUDA) for _ in range(3)]
    for step in range(30):
        with torch.cuda.stream(streams[step % 3]):
            if step % 10 == 5:
                tapes.append(pool.capture(add).tape)
            else:
                pool.replay(tapes[step % len(tapes)])
    torch.cuda.synchronize()
    assert (total == 31).all()


def test_graphed_on_one_stream_after_the_other() -> None:
    def slow_double(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(200_000)
        return x * 2

    inputs = [torch.full((4, 1 << 14), float(step), device=CUDA) for step in range(30)]
    streams = [torch.cuda.Stream(CUDA) for _ in range(3)]
    with graphed(slow_double, sizes=[4]) as fast:
        fast(inputs[0])
        torch.cuda.synchronize()
        results = []
        for step, x in enumerate(inputs):
            with torch.cuda.stream(streams[step % 3]):
                results.append(fast(x).clone())
        torch.cuda.synchronize()
        for step, result in enumerate(results):
            assert (result == 2 * step).all()


def test_a_replay_in_a_capture_by_others_is_refused(pools: list[GraphPool]) -> None:
    pool = pools[0]
    x = torch.ones(4, device=CUDA)
    captured = pool.capture(lambda: x * 2)
    graph = torch.cuda.CUDAGraph()
    refused: list[BaseException] = []
    with torch.cuda.graph(graph):
        y = x + 1
        try:
            pool.replay(captured.tape)
        except CaptureError as error:
            refused.append(error)
    assert "other code is capturing" in str(refused[0])
    graph.replay()
    assert torch.equal(y, x + 1)
    x.fill_(3)
    pool.replay(captured.tape)
    assert captured.output.tolist() == [6.0] * 4


def test_graphs_that_draw_at_once_draw_one_sequence(pools: list[GraphPool]) -> None:
    """torch passes the offset through memory of the generator, which all its graphs read."""

    def draw() -> torch.Tensor:
        torch.cuda._sleep(500_000)  # the other replay is enqueued before this one reads it
        return torch.rand(4096, device=CUDA)

    tapes = [pool.capture(draw) for pool in pools]
    plain = pools[0].capture(lambda: torch.ones(4, device=CUDA) * 2)  # no draws, no order

    def drawn(streams: list[torch.cuda.Stream]) -> list[torch.Tensor]:
        torch.manual_seed(7)
        results = []
        for turn in range(6):
            index = turn % 2
            with torch.cuda.stream(streams[index]):
                pools[index].replay(tapes[index].tape)
                results.append(tapes[index].output.clone())
        torch.cuda.synchronize()
        return results

    one_stream = drawn([torch.cuda.current_stream(CUDA)] * 2)
    two_streams = drawn([torch.cuda.Stream(CUDA) for _ in range(2)])
    assert len({tuple(row[:8].tolist()) for row in one_stream}) == 6
    for one, other in zip(one_stream, two_streams, strict=True):
        assert torch.equal(one, other)
    pools[0].replay(plain.tape)
    assert plain.output.tolist() == [2.0] * 4


def test_pools_come_and_go_while_another_thread_captures() -> None:
    """CUDA gives a capture up if the device is synchronised or a pool destroyed meanwhile."""
    x = torch.ones(1024, device=CUDA)
    torch.cuda.synchronize()

    def many() -> int:
        count = 0
        for _ in range(25):
            with GraphPool(CUDA, lazy_capture=True) as pool:
                for factor in range(4):
                    captured = pool.capture(lambda factor=factor: x * factor + 1)
                    pool.replay(captured.tape)
                    count += int(captured.output[0].item() == factor + 1)
                pool.release_unused()
        return count

    assert at_once(many, many, many) == [100, 100, 100]


# --- counters -------------------------------------------------------------------------------------


def test_counters_that_other_graphs_overwrote_do_not_matter(pools: list[GraphPool]) -> None:
    """The graphs of a pool share memory: what one counted in, another may have filled."""
    torch.manual_seed(0)
    pool = pools[0]
    x = torch.randn(32, 2048, device=CUDA).to(torch.bfloat16)
    weight = (torch.randn(2048, 2048, device=CUDA) * 0.02).to(torch.bfloat16)
    config = TileConfig(64, 64, 4, 3, split_k=8)
    slabs: list[int] = []

    def split() -> torch.Tensor:
        slabs.append(take_counters(CUDA, 1).data_ptr())
        y = x
        for _ in range(4):
            y = run_kernel(config, Gemm(y, weight))
        return y

    expected = split()
    captured = pool.capture(split)
    out = pool.weak(captured.output)
    garbage: list[range] = []

    def fill() -> None:
        held = [torch.full((1 << 16,), 0x5EED, dtype=torch.int32, device=CUDA) for _ in range(64)]
        garbage.extend(range(t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in held)

    tape = captured.tape
    del captured
    filling = pool.capture(fill).tape
    assert any(slabs[-1] in each for each in garbage)  # it is the same memory
    for _ in range(5):
        pool.replay(filling)
        pool.replay(tape)
        assert torch.equal(out, expected)
        pool.replay(tape)  # and after a replay of its own, which leaves its counts there
        assert torch.equal(out, expected)


def test_one_memset_serves_a_recording() -> None:
    """Of split launches in one graph: as many nodes as launches, and one that zeroes."""
    x = torch.randn(32, 512, device=CUDA).to(torch.bfloat16)
    weight = torch.randn(512, 512, device=CUDA).to(torch.bfloat16)
    whole, split = TileConfig(64, 64, 4, 3), TileConfig(64, 64, 4, 3, split_k=4)

    def nodes(config: TileConfig, launches: int) -> int:
        def forward() -> None:
            for _ in range(launches):
                run_kernel(config, Gemm(x, weight))

        forward()
        with GraphPool(CUDA, lazy_capture=True) as pool:
            counted = pool.capture(forward).tape.num_nodes
        if counted is None:
            pytest.skip("needs CUDA's Python bindings")
        return counted

    assert nodes(whole, 10) == 10
    assert nodes(split, 10) == 11
    assert nodes(split, 20) == 21
