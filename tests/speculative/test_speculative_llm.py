"""Speculative decoding from the outside: the same output in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import TINY_NATIVE, save_talking, save_tiny

from ostinato import (
    LLM,
    AttentionCGSupport,
    ConfigError,
    CUDAGraphMode,
    DraftModel,
    EagleDrafts,
    EngineConfig,
    GraphConfig,
    NgramDrafts,
    Proposer,
    ProposerContext,
    Reason,
    ReplayedDrafts,
    RequestOutput,
    SamplingParams,
    Speculation,
    SuffixDrafts,
    compilation_counter,
)
from ostinato.attention.reference.torch_paged import TorchPagedAttention
from ostinato.engine.explain import explain_batch
from ostinato.ops.decode_state import DecodeState

MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE", "FULL_AND_FULL"]
PROMPTS = [[1, 2, 3, 1, 2], list(range(10, 45)), [7], [50, 40, 50, 40, 50, 40]]
NUM_NEW = 24


def open_llm(checkpoint: Path | str, device: torch.device | str = "cpu", **settings: Any) -> LLM:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 96,
        "kv_cache_memory_bytes": "4M",
        "show_progress": False,
    }
    return LLM(str(checkpoint), device=str(device), **{**options, **settings})


def open_tiny(device: torch.device | str = "cpu", **settings: Any) -> LLM:
    return open_llm("tiny", device, **{"random_weights": True, **settings})


def tokens_of(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


def greedy(num_new: int = NUM_NEW, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_new, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    """By transformers, one prompt at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    outputs = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def proposers(texts: list[list[int]]) -> dict[str, Speculation]:
    return {
        "suffix": SuffixDrafts(num_tokens={1: 6, 4: 2}, history_len=200),
        "right": ReplayedDrafts(texts=texts, num_tokens=4),
        "half": ReplayedDrafts(texts=texts, num_tokens={2: 3, 4: 2}, acceptance=0.5),
    }


CASES = [("suffix", True), ("right", True), ("half", True), ("half", False)]


@pytest.mark.sweep
@pytest.mark.parametrize(("drafts", "overlap"), CASES)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_is_that_of_transformers(
    device: torch.device,
    llama: Path,
    expected: list[list[int]],
    mode: str,
    drafts: str,
    overlap: bool,
) -> None:
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    with open_llm(
        llama,
        device,
        graphs=GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8, 20]),
        async_scheduling=overlap,
        speculative=proposers(texts)[drafts],
    ) as llm:
        for _ in range(2):  # with the prefix cache, and with past output
            params = greedy(ignore_eos=True)
            assert tokens_of(llm, PROMPTS, params) == expected
        stats = llm.speculation
        assert stats.num_runs > 0
        if drafts == "right":
            assert stats.acceptance_length > 4
        if drafts in ("half", "suffix"):
            assert stats.acceptance_length > 1.3


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_right_drafts_save_steps(device: torch.device, overlap: bool) -> None:
    prompt, num_new = [3, 1, 4], 41
    with open_tiny(device) as llm:
        output = tokens_of(llm, [prompt], greedy(num_new, ignore_eos=True))[0]
        plain_steps = llm.engine.runner.stats.hits
    with open_tiny(
        device,
        speculative=ReplayedDrafts(texts=[prompt + output], num_tokens=4),
        async_scheduling=overlap,
    ) as llm:
        assert tokens_of(llm, [prompt], greedy(num_new, ignore_eos=True)) == [output]
        stats = llm.speculation
        # After the prompt's token, 40 are left: 8 steps of 5.
        assert (stats.num_runs, stats.num_drafts, stats.num_accepted) == (8, 32, 32)
        assert (stats.acceptance_length, stats.acceptance_rate) == (5.0, 1.0)
        runner = llm.engine.runner.stats
        assert plain_steps == num_new
        assert runner.hits == 9 + overlap  # one step too many, started before the end was known
        assert runner.misses == 0


@pytest.mark.slow
def test_acceptance_is_as_set(device: torch.device) -> None:
    """The mean of accepted drafts, if each is right with probability 0.6: 0.6 + 0.36 + 0.216."""
    prompts = [[n, n + 1] for n in range(8)]
    params = greedy(90, ignore_eos=True)
    with open_tiny(device, max_num_seqs=8) as llm:
        outputs = tokens_of(llm, prompts, params)
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    drafts = ReplayedDrafts(texts=texts, num_tokens=3, acceptance=0.6)
    with open_tiny(device, max_num_seqs=8, speculative=drafts) as llm:
        assert tokens_of(llm, prompts, params) == outputs
        assert llm.speculation.acceptance_length == pytest.approx(2.176, abs=0.2)
        llm.speculation.reset()
        assert llm.speculation.acceptance_length == llm.speculation.acceptance_rate == 0
    with open_tiny(device, speculative=ReplayedDrafts(texts=texts, acceptance=0.0)) as llm:
        assert tokens_of(llm, prompts[:4], params) == outputs[:4]
        assert llm.speculation.num_accepted == 0


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sampled_output_has_the_distribution_of_the_model(tmp_path: Path) -> None:
    """Chi-square of the second and third token of 2,500 requests, against transformers' softmax.

    The vocabulary is so small that drafts are often right.
    """
    vocab_size, prompt, count = 6, [1, 2, 3, 1], 2500
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=96,
        eos_token_id=None,
    )
    checkpoint = save_tiny(config, tmp_path / "six")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def next_token(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].div(1.5).softmax(-1).double()

    expected = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    first = next_token(prompt)
    for one in range(vocab_size):
        second = next_token([*prompt, one])
        for two in range(vocab_size):
            third = next_token([*prompt, one, two])
            expected[two] += first[one] * second[two] * third
    params = SamplingParams(temperature=1.5, max_tokens=3)
    with open_llm(
        checkpoint, max_num_seqs=64, max_num_batched_tokens=512, speculative="ngram"
    ) as llm:
        outputs = tokens_of(llm, [prompt] * count, params)
        assert llm.speculation.num_accepted > count / 10
    pairs = Counter((tokens[1], tokens[2]) for tokens in outputs)
    observed = torch.tensor(
        [[pairs[one, two] for two in range(vocab_size)] for one in range(vocab_size)]
    ).double()
    likely = expected * count >= 5
    degrees = int(likely.sum()) - 1
    distance = ((observed - expected * count) ** 2 / (expected * count))[likely].sum()
    assert degrees > 15
    assert distance < degrees + 4.5 * (2 * degrees) ** 0.5


SAMPLERS = {
    "temperature": {"temperature": 0.9},
    "filters": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"temperature": 0.7, "logit_bias": {5: 6.0, 9: 5.0}},
    # Which of the three comes next depends on all tokens before it, drafts included.
    "counts": {"temperature": 0, "logit_bias": {5: 50, 9: 50, 13: 50}, "frequency_penalty": 2.0},
    "min_tokens": {"temperature": 0, "min_tokens": 15, "stop_token_ids": list(range(0, 512, 4))},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
}


def sampled_by(sampler: str) -> list[SamplingParams]:
    """By ``sampler``, and beside it a greedy request, which must not change either."""
    params = SamplingParams(max_tokens=NUM_NEW, seed=3, ignore_eos=True, **SAMPLERS[sampler])
    return [params, greedy(ignore_eos=True)]


@cache
def without_drafts(device: torch.device, sampler: str) -> list[RequestOutput]:
    with open_tiny(device) as llm:
        return llm.generate(PROMPTS[:2], sampled_by(sampler))


@pytest.mark.sweep
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE", "FULL_AND_FULL"])
def test_every_way_of_sampling_gives_the_tokens_of_no_drafts(
    device: torch.device, mode: str, sampler: str
) -> None:
    prompts, params = PROMPTS[:2], sampled_by(sampler)
    plain = without_drafts(device, sampler)
    texts = [each.prompt_token_ids + each.outputs[0].token_ids for each in plain]
    with open_tiny(
        device,
        graphs=GraphConfig(mode=mode, capture_sizes=[1, 2, 4, 8]),
        speculative=ReplayedDrafts(texts=texts, num_tokens=3, acceptance=0.8),
    ) as llm:
        for _ in range(2):  # the sampler is launched, captured, replayed
            got = llm.generate(prompts, params)
            for one, other in zip(got, plain, strict=True):
                mine, its = one.outputs[0], other.outputs[0]
                assert mine.token_ids == its.token_ids
                assert mine.finish_reason == its.finish_reason
                assert (mine.logprobs is None) == (its.logprobs is None)
                for row, its_row in zip(mine.logprobs or [], its.logprobs or [], strict=True):
                    assert {token: each.logprob for token, each in row.items()} == pytest.approx(
                        {token: each.logprob for token, each in its_row.items()}, abs=1e-4
                    )
                if mine.cumulative_logprob is not None:
                    assert mine.cumulative_logprob == pytest.approx(
                        its.cumulative_logprob, abs=1e-3
                    )
        assert llm.speculation.acceptance_length > 2


# --- where a request ends -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking(tmp_path_factory.mktemp("talking"), None)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_ends_inside_a_run_of_accepted_tokens(talking: Path, overlap: bool) -> None:
    """Stop strings, stop tokens and context at every place of a run."""
    prompt = "w1 w2 w3"
    with open_llm(talking) as llm:
        full = llm.generate(prompt, greedy(20))[0]
        words, tokens = full.outputs[0].text.split(), full.outputs[0].token_ids
        every = [
            *(greedy(20, stop=[word], logprobs=1) for word in words[1:12]),
            *(greedy(20, stop=[" ".join(words[n : n + 2])]) for n in range(1, 8)),
            *(greedy(20, stop=[words[5]], include_stop_str_in_output=True) for _ in range(1)),
            *(greedy(20, stop_token_ids=[token]) for token in tokens[1:12]),
            *(greedy(20, stop_token_ids=tokens[2:5], min_tokens=n) for n in range(8)),
            *(greedy(20, stop=[words[3]], stop_token_ids=[tokens[4]]) for _ in range(1)),
            *(greedy(n) for n in range(1, 12)),
        ]
        plain = [llm.generate(prompt, params)[0].outputs[0] for params in every]
    drafts = ReplayedDrafts(texts=[full.prompt_token_ids + tokens], num_tokens=4)
    with open_llm(talking, speculative=drafts, async_scheduling=overlap) as llm:
        for params, its in zip(every, plain, strict=True):
            mine = llm.generate(prompt, params)[0].outputs[0]
            assert (mine.text, mine.token_ids) == (its.text, its.token_ids)
            assert (mine.finish_reason, mine.stop_reason) == (its.finish_reason, its.stop_reason)
            assert len(mine.logprobs or []) == len(its.logprobs or [])
        pieces = "".join(delta.text for delta in llm.stream(prompt, greedy(20)))
        assert pieces == full.outputs[0].text
        assert llm.speculation.acceptance_length > 2.5


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_up_to_the_longest_sequence(device: torch.device, overlap: bool) -> None:
    """Near it drafts no longer fit; other requests go on."""
    prompts = [[3, 1, 4], list(range(60)), [9] * 93]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with open_tiny(device) as llm:
        outputs = tokens_of(llm, prompts, params)
    assert [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)] == [96] * 3
    texts = [p + o for p, o in zip(prompts, outputs, strict=True)]
    for num_tokens in (1, 4, 7):
        drafts = ReplayedDrafts(texts=texts, num_tokens=num_tokens)
        with open_tiny(device, speculative=drafts, async_scheduling=overlap) as llm:
            assert tokens_of(llm, prompts, params) == outputs
            allocator = llm.engine.scheduler.allocator
            assert allocator.num_free_blocks == llm.engine.runner.cache.num_blocks - 1


def test_only_accepted_tokens_are_reused(device: torch.device) -> None:
    """Blocks written by drafts that were wrong must not be found under the right tokens."""
    prompt = list(range(30))
    with open_tiny(device, enable_prefix_caching=False) as llm:
        params = greedy(60, ignore_eos=True)
        output = tokens_of(llm, [prompt], params)[0]
        longer = prompt + output[:50]
        further = tokens_of(llm, [longer], greedy(10, ignore_eos=True))
    drafts = ReplayedDrafts(texts=[prompt + output], num_tokens=4, acceptance=0.5)
    with open_tiny(device, speculative=drafts) as llm:
        assert tokens_of(llm, [prompt], params) == [output]
        result = llm.generate([longer], greedy(10, ignore_eos=True))[0]
        assert result.num_cached_tokens == 64  # whole blocks of 80 tokens, but not the last
        assert [result.outputs[0].token_ids] == further


def test_past_output_makes_drafts(device: torch.device) -> None:
    """The same prompt again: the suffix proposer has seen what follows."""
    prompt, params = [11, 12, 13], greedy(40, ignore_eos=True)
    with open_tiny(device, speculative=SuffixDrafts(num_tokens=4, history_len=100)) as llm:
        output = tokens_of(llm, [prompt], params)
        first = llm.speculation.acceptance_length
        for _ in range(4):  # the ring is full after two
            llm.speculation.reset()
            assert tokens_of(llm, [prompt], params) == output
            assert llm.speculation.acceptance_length > max(3.5, first)


# --- plans ----------------------------------------------------------------------------------------


def test_dynamic_drafts_have_graphs_of_several_query_lengths() -> None:
    graphs = GraphConfig(mode="FULL_DECODE_ONLY", capture_sizes=[1, 2, 4, 8, 16])
    drafts = ReplayedDrafts(num_tokens={1: 4, 2: 2, 3: 0})
    before = compilation_counter.clone()
    with open_tiny(graphs=graphs, speculative=drafts, max_num_seqs=4) as llm:
        plan = llm.engine.runner.plan
        assert plan.decode_query_lens == (1, 3, 5)
        # Up to 4 requests of 1 token, 2 of 3, and 1 of 5.
        sizes = {length: plan.decode_sizes_for(length) for length in plan.decode_query_lens}
        assert sizes == {1: (1, 2, 4), 3: (3, 6), 5: (5,)}
        captured = compilation_counter.num_cudagraph_captured - before.num_cudagraph_captured
        assert captured == len(plan.entries) == 6
        params = [greedy(4 * (n + 1), ignore_eos=True) for n in range(4)]
        llm.generate(PROMPTS, params)
        replays = llm.engine.runner.stats.replays
        used = {key.query_len: key.num_reqs for key in replays if key.uniform}
        assert used.keys() == {1, 3, 5}
        assert all(key.num_reqs == 1 for key in replays if key.query_len == 5)
        assert llm.engine.runner.stats.misses <= 1  # the prompts


@pytest.mark.parametrize(("max_tokens", "query_len"), [(64, 3), (16, 5)])
def test_the_largest_batch_has_a_graph_by_default(max_tokens: int, query_len: int) -> None:
    """Sizes up to 16, rounded up to whole requests, would skip 12 = 4 x 3, and 15 = 3 x 5."""
    config = EngineConfig(
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=max_tokens,
        speculative=NgramDrafts(num_tokens=query_len - 1),
    )
    for num_reqs in range(1, min(4, max_tokens // query_len) + 1):
        answer = explain_batch(config, num_tokens=query_len * num_reqs, num_reqs=num_reqs)
        assert answer["reason"] == Reason.UNIFORM_DECODE.value


@dataclass(frozen=True, kw_only=True)
class Counting(Speculation):
    """Drafts of a user's own: each token is the one before it plus one."""

    def build(self, context: ProposerContext) -> Proposer:
        return _CountingProposer(context.vocab_size)


class _CountingProposer(Proposer):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, state: DecodeState) -> None:
        rows, last = state.req_indices, state.num_computed[state.req_indices].long()
        token = state.token_ids[rows, last]
        for offset in range(1, state.query_len):
            token = torch.remainder(token + 1, self._vocab_size)
            state.token_ids[rows, last + offset] = token


def test_a_proposer_of_ones_own(device: torch.device) -> None:
    params = greedy(8)
    with open_tiny(device) as llm:
        outputs = tokens_of(llm, PROMPTS, params)
    with open_tiny(device, speculative=Counting(num_tokens=2)) as llm:
        assert tokens_of(llm, PROMPTS, params) == outputs
        assert llm.speculation.num_runs > 8


@dataclass(frozen=True, kw_only=True)
class Constant(Speculation):
    """Drafts one number, whether it is a token id or not."""

    draft: int = 0

    def build(self, context: ProposerContext) -> Proposer:
        return _ConstantProposer(torch.tensor(self.draft, dtype=torch.int32, device=context.device))


class _ConstantProposer(Proposer):
    def __init__(self, draft: torch.Tensor) -> None:
        self._draft = draft

    def propose(self, state: DecodeState) -> None:
        rows, last = state.req_indices, state.num_computed[state.req_indices].long()
        for offset in range(1, state.query_len):
            state.token_ids[rows, last + offset] = self._draft


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("draft", [-1, 10**9])
def test_drafts_that_are_no_tokens(device: torch.device, draft: int, mode: str) -> None:
    params = greedy(6)
    filtered = SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.5, logprobs=1)
    graphs = GraphConfig(mode=mode)
    with open_tiny(device, graphs=graphs) as llm:
        outputs = [tokens_of(llm, PROMPTS, each) for each in (params, filtered)]
    with open_tiny(device, graphs=graphs, speculative=Constant(draft=draft, num_tokens=2)) as llm:
        assert [tokens_of(llm, PROMPTS, each) for each in (params, filtered)] == outputs
        assert llm.speculation.num_runs > 8


@pytest.mark.parametrize("built", [None, object()])
def test_what_is_no_proposer(built: Any) -> None:
    class Wrong(Speculation):
        def build(self, context: ProposerContext) -> Proposer:
            return built  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=r"Wrong\.build\(\) returned .*, which is not a Proposer"):
        open_tiny(speculative=Wrong())


def test_modes_are_resolved_for_the_longest_query(device: torch.device) -> None:
    with open_tiny(device) as llm:
        plain = llm.engine.resolved_mode
    with open_tiny(device, speculative="ngram") as llm:
        assert llm.engine.resolved_mode == plain
        assert llm.config.decode_query_lens(device) == {1: 4, 5: 4}


class SingleTokens(TorchPagedAttention):
    """Can be captured for decode batches of one token per request only."""

    name = "single"
    support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


def test_attention_that_cannot_be_captured_for_drafts(device: torch.device) -> None:
    """Decode steps then run in pieces."""
    with open_tiny(device) as llm:
        outputs = tokens_of(llm, PROMPTS, greedy())
    with open_tiny(device, attention=SingleTokens(), speculative=NgramDrafts(num_tokens=1)) as llm:
        assert llm.engine.resolved_mode.mode is CUDAGraphMode.PIECEWISE
        assert tokens_of(llm, PROMPTS, greedy()) == outputs


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_a_step_that_fails_loses_no_token(device: torch.device, overlap: bool) -> None:
    params = greedy(ignore_eos=True)
    with open_tiny(device) as llm:
        outputs = tokens_of(llm, PROMPTS, params)
    texts = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    drafts = ReplayedDrafts(texts=texts, num_tokens=3, acceptance=0.7)
    with open_tiny(device, speculative=drafts, async_scheduling=overlap) as llm:
        engine = llm.engine
        completions = [engine.prepare_request(prompt, params)[0] for prompt in PROMPTS]
        for completion in completions:
            engine.add(completion)
        run, calls = engine.runner.run, 0

        def run_or_fail(plan: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 5 == 0:
                raise RuntimeError("the device is gone")
            return run(plan)

        engine.runner.run = run_or_fail  # type: ignore[method-assign]
        num_failed = 0
        while engine.has_unfinished:
            try:
                engine.step()
            except RuntimeError:
                num_failed += 1
        assert num_failed >= 2
        assert [completion.output.token_ids for completion in completions] == outputs


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramDrafts(num_tokens=0), "num_tokens must be a positive integer, got 0"),
        (lambda: NgramDrafts(num_tokens={}), "num_tokens is empty; give at least one batch size"),
        (lambda: NgramDrafts(num_tokens={0: 2}), "a batch size in num_tokens must be a positive"),
        (
            lambda: NgramDrafts(num_tokens={4: -1}),
            "num_tokens has -1 drafts for batches of up to 4",
        ),
        (lambda: NgramDrafts(min_match=3, max_match=2), "min_match 3 is above max_match 2"),
        (lambda: NgramDrafts(max_match=0), "max_match must be a positive integer, got 0"),
        (lambda: NgramDrafts(num_token=3), "did you mean num_tokens?"),
        (lambda: SuffixDrafts(history_len=-1), "history_len must be a positive integer, got -1"),
        (lambda: SuffixDrafts(history_len=10**12), "history_len is at most 268435456, got 10000"),
        (lambda: ReplayedDrafts(seed=None), r"seed must be an integer in \[0, 2\*\*63\), got None"),
        (lambda: DraftModel(model="m", seed="1"), "seed must be an integer in .* got '1'"),
        (lambda: DraftModel(model="m", random_weights="no"), "must be True or False, got 'no'"),
        (lambda: EagleDrafts(model="m", layers=2), "layers must be a list of numbers of layers, g"),
        (lambda: EagleDrafts(model="m", layers="0,1"), "layers must be a list of numbers .*'0,1'"),
        (lambda: EagleDrafts(model="m", layers=[0, -1]), r"layers must be a list .*\[0, -1\]"),
        (lambda: NgramDrafts(max_match=2**70), "max_match is at most 1,048,576, got 1180591620"),
        (lambda: ReplayedDrafts(texts="abc"), "texts must be a list of lists of token ids, got"),
        (lambda: ReplayedDrafts(texts=[3]), "texts must be lists of token ids, got 3"),
        (lambda: ReplayedDrafts(texts=[[1, -5]]), r"texts must be lists of token ids, got \[1, -5"),
        (
            lambda: open_tiny(speculative=ReplayedDrafts(texts=[[1], [2, 10**6]])),
            "texts of ReplayedDrafts have the token 1000000, but token ids of this model go from",
        ),
        (lambda: ReplayedDrafts(acceptance=1.5), r"acceptance must be in \[0, 1\], got 1.5"),
        (lambda: open_tiny(speculative="eagle9"), "speculative must be 'ngram', 'suffix', or an"),
        (lambda: open_tiny(speculative=4), "speculative must be 'ngram', 'suffix', or an object"),
        (
            lambda: open_tiny(speculative="ngram", swiftkv_layers=1),
            "speculative does not work with SwiftKV models",
        ),
        (
            lambda: open_tiny(speculative=NgramDrafts(num_tokens=64)),
            "64 drafts per request, but a step computes at most max_num_batched_tokens=64 tokens",
        ),
        (lambda: LLM(speculative_config={"method": "ngram"}), r"write speculative=NgramDrafts"),
    ],
)
def test_options_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_drafts_by_batch_size() -> None:
    drafts: Sequence[int] = NgramDrafts(num_tokens={4: 3, 2: 5, 6: 0}).num_drafts(8)
    assert drafts == (5, 5, 5, 3, 3, 0, 0, 0, 0)
    assert NgramDrafts(num_tokens=2).num_drafts(3) == (2, 2, 2, 2)


def test_a_source_of_drafts_that_makes_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="Speculation has no build"):
        LLM("tiny", random_weights=True, device="cpu", speculative=Speculation())
