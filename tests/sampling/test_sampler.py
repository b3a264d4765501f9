"""The sampler, against transformers' processors, plain arithmetic and statistics.

Seeds are fixed and draws are a hash, so the statistical tests give the same answer every time.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ostinato import GraphPool
from ostinato.errors import ConfigError
from ostinato.ops.sampling import counter_random
from ostinato.ops.sampling.counter_random import exponential_log, mix32, random_words, spread_seed
from ostinato.ops.sampling.sampling_reference import processed_logits
from ostinato.sampling.sampler import SamplerOutput, sample
from ostinato.sampling.sampling_state import (
    STOP_IDS_WIDTH,
    SamplingFeatures,
    SamplingState,
    feature_bits,
)
from ostinato.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from ostinato.scheduling.request import Request

VOCAB, MAX_LEN = 64, 24
GREEDY = SamplingParams(temperature=0)
CPU = torch.device("cpu")


# --- a batch in a few words ---------------------------------------------------------------------


@dataclass
class Row:
    """One request: its parameters, its tokens so far, and the logits of the next."""

    params: SamplingParams
    logits: torch.Tensor
    prompt: list[int] = field(default_factory=lambda: [1])
    output: list[int] = field(default_factory=list)
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    @property
    def request(self) -> Request:
        return Request(
            request_id="r",
            prompt_token_ids=self.prompt,
            params=self.params,
            max_total_tokens=MAX_LEN,
            seed=self.seed,
            stop_token_ids=self.stop_ids,
            output_token_ids=self.output,
        )


class Batch:
    """The tensors that ``sample`` takes, with poison wherever nothing should be read."""

    def __init__(
        self, rows: Sequence[Row], device: torch.device, *, num_state_rows: int = 0
    ) -> None:
        size = max(num_state_rows, len(rows))
        self.state = SamplingState(size, device)
        self.token_ids = torch.full((size, MAX_LEN), 2**30, dtype=torch.int32, device=device)
        self.logits = torch.full((len(rows), rows[0].logits.shape[-1]), math.nan, device=device)
        self.req_indices = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(len(rows), dtype=torch.int32, device=device)
        self.features = SamplingFeatures.of(row.params for row in rows)
        for index, row in enumerate(rows):
            self.put(index, size - 1 - index, row)

    def put(self, index: int, req_index: int, row: Row) -> None:
        tokens = row.request.all_token_ids
        self.state.write(req_index, row.request)
        # After the end: the tokens of an earlier request, and what is no token at all.
        self.token_ids[req_index, 0::3] = 2
        self.token_ids[req_index, 1::3] = 7
        self.token_ids[req_index, 2::3] = -7
        self.token_ids[req_index, : len(tokens)] = torch.tensor(tokens)
        self.logits[index] = row.logits
        self.req_indices[index] = req_index
        self.lengths[index] = len(tokens)

    def call(self, function: Callable[..., Any], features: SamplingFeatures | None = None) -> Any:
        return function(
            self.logits,
            self.req_indices,
            self.lengths,
            self.state,
            self.token_ids,
            features or self.features,
        )

    def sample(self, features: SamplingFeatures | None = None) -> SamplerOutput:
        return self.call(sample, features)

    def scores(self, features: SamplingFeatures | None = None) -> torch.Tensor:
        """The logits to sample from, by the reference."""
        return processed_logits(
            self.logits,
            self.req_indices,
            self.lengths,
            self.state.tables,
            self.token_ids,
            (features or self.features).steps,
        )

    def tokens(self, features: SamplingFeatures | None = None) -> list[int]:
        return self.sample(features).token_ids.tolist()


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def everything(seed: int = 0, **changes: Any) -> SamplingParams:
    """Parameters that use every feature."""
    options: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 2.0, 5: -2.0},
        "min_tokens": 4,
        "logprobs": 3,
    }
    return SamplingParams(**(options | changes))


# --- the hash -----------------------------------------------------------------------------------

WORD = 2**32


def python_mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD % WORD
    x = (x ^ x >> 15) * 0xD35A2D97 % WORD
    return x ^ x >> 15


def python_word(seed: int, position: int, index: int) -> int:
    """The hash in Python's unbounded integers."""
    key = spread_seed(seed) % 2**64
    offset, second = (
        python_mix((half ^ position * 0x9E3779B1) % WORD) for half in (key % WORD, key >> 32)
    )
    column = index * 0x9E3779B1 % WORD
    column = (column ^ column >> 15) * 0x21F0AAAD % WORD
    word = (column ^ offset) * (second >> 1 | 1 << 30 | 1)
    word = (word ^ word >> 32) % WORD
    return word * 0x7FEB352D % 2**52


def keys_of(seeds: Iterable[int], device: torch.device = CPU) -> torch.Tensor:
    return torch.tensor([spread_seed(seed) for seed in seeds], device=device)


def test_the_hash_gives_these_numbers(device: torch.device) -> None:
    mixed = mix32(torch.tensor([0, 1, 2**31, 2**32 - 1], device=device))
    assert mixed.tolist() == [0, 114555507, 3233617010, 3652544131]
    # A known value: this is the finisher of splitmix64.
    assert spread_seed(0) % 2**64 == 0xE220A8397B1DCDAF
    assert spread_seed(0x9E3779B97F4A7C15) % 2**64 == 0x6E789E6AA1B965F4
    keys = keys_of([0, 1, 2**32, 2**63 - 1], device)
    positions = torch.tensor([0, 1, 131_071, 2**31 - 1], dtype=torch.int32, device=device)
    assert random_words(keys, positions, 128_000, 128_003).tolist() == [
        [3197046286460957, 953079078429441, 4068701420412350],
        [711856472436916, 2461378614436286, 1706438738764734],
        [1946505472428524, 4220645840658536, 3457772750391238],
        [719050843285420, 462461845681432, 814578189204482],
    ]


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    start=st.integers(0, 300_000),
)
@example(seed=2**63 - 1, position=2**31 - 1, start=300_000)
@example(seed=0, position=0, start=0)
@example(seed=2**32 - 1, position=0, start=0)
def test_the_hash_is_what_unbounded_integers_give(seed: int, position: int, start: int) -> None:
    words = random_words(keys_of([seed]), torch.tensor([position]), start, start + 5)
    assert words[0].tolist() == [python_word(seed, position, start + i) for i in range(5)]


def test_pieces_do_not_show(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, positions = keys_of(range(6), device), torch.arange(6, device=device)
    whole = exponential_log(keys, positions, 1000)
    for elements in (1, 6 * 7, 6 * 999):
        monkeypatch.setattr(counter_random, "PIECE_ELEMENTS", elements)
        assert torch.equal(exponential_log(keys, positions, 1000), whole)


def test_draws_are_finite_at_the_ends(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = torch.tensor([[0, 1, 2**51, 2**52 - 2, 2**52 - 1]], device=device)
    monkeypatch.setattr(counter_random, "random_words", lambda *_: ends)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    draws = exponential_log(zero, zero, 5)[0]
    assert draws.isfinite().all()
    assert draws[0].item() == pytest.approx(-33 * math.log(2), rel=1e-6)
    assert draws[2].item() == pytest.approx(math.log(math.log(2)), rel=1e-6)
    assert draws[4].item() == pytest.approx(math.log(24 * math.log(2)), rel=1e-3)
    assert (draws.diff() >= 0).all()


def chi_square_limit(degrees: int) -> float:
    """Exceeded by chance about once in 30,000 times (Wilson and Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    observed, expected = observed.double().cpu(), expected.double().cpu()
    return float(((observed - expected) ** 2 / expected).sum())


SEED_AND_POSITION: dict[str, Callable[[int], tuple[int, int]]] = {
    "positions of one seed": lambda row: (1234, row),
    "neighbouring seeds": lambda row: (row, 7),
    "seeds that differ in high bits": lambda row: (row << 50, 7),
    "both": lambda row: (row, row),
    "from the top": lambda row: (2**63 - 1 - row, row),
}


@pytest.mark.parametrize("rows", SEED_AND_POSITION.values(), ids=SEED_AND_POSITION.keys())
def test_words_are_uniform_and_unrelated(rows: Callable[[int], tuple[int, int]]) -> None:
    num_rows, num_columns = 256, 8192
    seeds, positions = zip(*map(rows, range(num_rows)), strict=True)
    words = random_words(keys_of(seeds), torch.tensor(positions), 0, num_columns)
    assert words.min() >= 0
    assert words.max() < 2**52
    words >>= 20  # the significant part
    for shift in (0, 8, 16, 24):  # every byte
        counts = torch.bincount((words >> shift & 255).flatten(), minlength=256)
        assert chi_square(counts, torch.full((256,), words.numel() / 256)) < chi_square_limit(255)
    # Pairs of neighbours: in the row, and in the same column of the next row.
    for first, second in ((words[:, :-1], words[:, 1:]), (words[:-1], words[1:])):
        pairs = (first >> 28 << 4) + (second >> 28)
        counts = torch.bincount(pairs.flatten(), minlength=256)
        assert chi_square(counts, torch.full((256,), pairs.numel() / 256)) < chi_square_limit(255)
        # If one is in the tail that decides draws, the other is there no more often.
        both = int(((first < WORD // 64) & (second < WORD // 64)).sum())
        assert abs(both - pairs.numel() / 64**2) < 4 * math.sqrt(pairs.numel() / 64**2)
    # No row is bad: one chi-square value per row, all of them plausible.
    per_row = torch.zeros(num_rows, 64).scatter_add_(1, words >> 26, torch.ones(words.shape))
    worst = ((per_row - 128) ** 2 / 128).sum(dim=1).max()
    assert worst < 1.05 * chi_square_limit(63)


def test_exponentials_are_exponential(device: torch.device) -> None:
    keys = keys_of([99] * 64, device)
    draws = exponential_log(keys, torch.arange(64, device=device), 4096).exp()
    # By the cumulative distribution into 100 equally likely bins.
    bins = (-torch.expm1(-draws) * 100).long().clamp(max=99).flatten()
    counts = torch.bincount(bins, minlength=100)
    assert chi_square(counts, torch.full((100,), draws.numel() / 100)) < chi_square_limit(99)
    assert draws.double().mean().item() == pytest.approx(1, abs=0.01)


# --- the distribution of tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("vary", "params"),
    [
        ("position", SamplingParams()),
        ("seed", SamplingParams()),
        ("position", SamplingParams(temperature=0.5)),
        ("seed", SamplingParams(temperature=3.0)),
        ("position", SamplingParams(top_k=5, temperature=1.5)),
        ("position", SamplingParams(top_p=0.8)),
        ("position", SamplingParams(min_p=0.1)),
        ("seed", SamplingParams(top_k=20, top_p=0.9, min_p=0.02, temperature=0.9)),
    ],
)
def test_tokens_follow_the_distribution(
    vary: str, params: SamplingParams, device: torch.device
) -> None:
    logits = random_logits(5, vocab=32, scale=1.5)
    size, steps = 2000, 10
    each = torch.arange(size, device=device)
    state = SamplingState(size, device)
    state.write(0, Row(params, logits, seed=42).request)
    # Every row like row 0, except for the seed.
    for column in (state.temperature, state.top_p, state.min_p, state.top_k, state.seed_key):
        column.copy_(column[0].clone().expand_as(column))
    tokens = []
    for start in range(0, size * steps, size):
        if vary == "seed":
            state.seed_key.copy_(keys_of(range(start, start + size)))
        output = sample(
            logits.to(device).expand(size, -1),
            each,
            each + start if vary == "position" else torch.full_like(each, 9),
            state,
            torch.zeros(size, 1, dtype=torch.int32, device=device),
            SamplingFeatures.of([params]),
        )
        tokens.append(output.token_ids)
    count = size * steps
    expected = transformers_scores(params, logits).softmax(dim=-1)[0]
    counts = torch.bincount(torch.cat(tokens), minlength=32).cpu()
    assert (counts[expected == 0] == 0).all()
    likely = expected * count >= 5  # chi-square needs a few samples of each
    rest = ~likely & (expected > 0)
    observed = torch.cat((counts[likely], counts[rest].sum()[None]))
    probable = torch.cat((expected[likely], expected[rest].sum()[None])) * count
    assert chi_square(observed, probable.clamp(min=1e-9)) < chi_square_limit(len(observed))


# --- greedy -------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    rows = [Row(GREEDY, torch.zeros(VOCAB)), Row(GREEDY, torch.zeros(VOCAB))]
    rows[1].logits[[9, 30]] = 1.0
    assert Batch(rows, device).tokens() == [0, 9]


@given(seed=st.integers(0, 10_000), levels=st.sampled_from([2, 5, 1000]), data=st.data())
def test_greedy_rows_in_a_mixed_batch_are_the_plain_argmax(
    seed: int, levels: int, data: st.DataObject
) -> None:
    logits = (random_logits(seed, rows=6) * levels / 3).round() * 3 / levels  # many ties
    greedy = replace(GREEDY, top_k=3, top_p=0.1, min_p=0.5)  # which must not matter
    other = everything(presence_penalty=0, frequency_penalty=0, repetition_penalty=1)
    mask = data.draw(st.lists(st.booleans(), min_size=6, max_size=6))
    batch = Batch(
        [
            Row(greedy if is_greedy else other, each)
            for is_greedy, each in zip(mask, logits, strict=True)
        ],
        CPU,
    )
    wanted = logits.argmax(dim=-1).tolist()
    tokens = batch.tokens()
    assert all(tokens[i] == wanted[i] for i in range(6) if mask[i])


def test_a_tiny_temperature_is_almost_greedy(device: torch.device) -> None:
    logits = random_logits(3, rows=4, scale=30.0)
    for temperature in (1e-3, 1e-30, 1e-300):
        params = SamplingParams(temperature=temperature, top_p=0.9, top_k=7, min_p=0.1)
        batch = Batch([Row(params, each) for each in logits], device)
        assert batch.tokens() == logits.argmax(dim=-1).tolist()


def test_a_huge_temperature_is_uniform(device: torch.device) -> None:
    state = SamplingState(1, device)
    params = SamplingParams(temperature=1e308)
    state.write(0, Row(params, torch.zeros(1)).request)
    positions = torch.arange(4000, device=device)
    logits = (torch.arange(8, device=device) * 100.0).expand(4000, -1)
    tokens = sample(
        logits, positions * 0, positions, state, positions[None], SamplingFeatures.of([params])
    ).token_ids
    counts = torch.bincount(tokens, minlength=8)
    assert chi_square(counts, torch.full((8,), 500.0)) < chi_square_limit(7)


# --- what may be drawn, against transformers ----------------------------------------------------


def transformers_scores(
    params: SamplingParams, logits: torch.Tensor, *, slack: float = 0.0
) -> torch.Tensor:
    """transformers' filters; ``slack`` widens (or, negative, narrows) what stays at the edges."""
    ids = torch.zeros(logits.shape[0], 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(float(params.temperature))(ids, logits.clone())
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        top_p = min(max(params.top_p * (1 + slack), 0.0), 1.0)
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if params.min_p > 0:
        min_p = min(max(params.min_p * (1 - slack), 0.0), 1.0)
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores


FILTERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 1.7, 10.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 1, 10**30]),
    top_p=st.one_of(st.just(1.0), st.just(0.999), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
)


@given(params=FILTERS, seed=st.integers(0, 10_000), scale=st.sampled_from([0.01, 1.0, 5.0]))
@example(params=SamplingParams(top_p=1e-9), seed=0, scale=1.0)
def test_filters_keep_what_transformers_keeps(
    params: SamplingParams, seed: int, scale: float
) -> None:
    logits = random_logits(seed, rows=3, scale=scale)
    oracle = params if params.top_k <= VOCAB else replace(params, top_k=0)
    batch = Batch([Row(params, each) for each in logits], CPU)
    batch.features = replace(batch.features, any_filter=True)
    scores = batch.scores()
    kept = scores.isfinite()
    # transformers sums in another order and rounds: only tokens at the very edge may differ.
    assert (kept | transformers_scores(oracle, logits, slack=-1e-5).isneginf()).all()
    assert (~kept | transformers_scores(oracle, logits, slack=1e-5).isfinite()).all()
    assert kept.any(dim=-1).all()
    assert torch.equal(scores[kept], logits[kept])  # what stays is not changed


def kept_tokens(params: SamplingParams, logits: torch.Tensor) -> list[int]:
    scores = Batch([Row(params, logits)], CPU).scores()[0]
    return scores.isfinite().nonzero().flatten().tolist()


def test_ties_at_the_edge_of_top_k_all_stay() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert kept_tokens(SamplingParams(top_k=2), logits) == [1, 2, 3, 4]
    assert TopKLogitsWarper(2)(torch.zeros(1, 1), logits[None]).isfinite().sum() == 4


def test_of_ties_at_the_edge_of_top_p_no_more_stay_than_it_takes() -> None:
    assert kept_tokens(SamplingParams(top_p=0.45), torch.zeros(10)) == [0, 1, 2, 3, 4]
    assert kept_tokens(SamplingParams(top_p=0.5), torch.zeros(4)) == [0, 1]
    assert kept_tokens(SamplingParams(top_p=0.501), torch.zeros(4)) == [0, 1, 2]
    probabilities = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    assert kept_tokens(SamplingParams(top_p=0.55), probabilities.log()) == [1, 2]
    assert kept_tokens(SamplingParams(top_p=0.75), probabilities.log()) == [1, 2, 3]


def test_top_p_counts_what_top_k_left() -> None:
    probabilities = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.1]).log()
    # Of all, 0.6 takes two tokens; of the three that top_k leaves, 0.4 / 0.8 and 0.2 / 0.8.
    assert kept_tokens(SamplingParams(top_p=0.45), probabilities) == [0, 1]
    assert kept_tokens(SamplingParams(top_p=0.45, top_k=2), probabilities) == [0]


def test_a_large_vocabulary_is_cut_where_a_sort_would_cut_it(device: torch.device) -> None:
    vocab = 50_000
    logits = random_logits(11, vocab=vocab, scale=2.0)[0]
    params = SamplingParams(top_p=0.9, top_k=20_000, temperature=1.3)
    kept = Batch([Row(params, logits)], device).scores()[0].isfinite().cpu()
    order = logits.sort(descending=True).indices
    probabilities = (logits[order[:20_000]].double() / 1.3).softmax(dim=0)
    size = int((probabilities.cumsum(dim=0) < 0.9).sum()) + 1
    assert abs(int(kept.sum()) - size) <= 1
    assert kept[order[: size - 1]].all()
    assert not kept[order[size + 1 :]].any()


@pytest.mark.slow
@given(params=FILTERS, seed=st.integers(0, 10_000))
def test_no_draw_leaves_what_is_kept(params: SamplingParams, seed: int) -> None:
    logits = random_logits(seed)[0]
    rows = [Row(params, logits, output=[0] * length, seed=seed) for length in range(8)]
    batch = Batch(rows, CPU)
    assert set(batch.tokens()) <= set(batch.scores()[0].isfinite().nonzero().flatten().tolist())


# --- bias, minimum length, penalties ------------------------------------------------------------

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN // 2)
CHANGES = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32)),
    min_tokens=st.integers(0, 8),
    max_tokens=st.none(),
)


def expected_scores(row: Row) -> torch.Tensor:
    """transformers if it has the feature, otherwise the OpenAI API's definition."""
    params, scores = row.params, row.logits[None].clone()
    ids = torch.tensor([row.request.all_token_ids])
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if row.stop_ids:
        hold_back = MinNewTokensLengthLogitsProcessor(
            len(row.prompt), params.min_tokens, sorted(row.stop_ids)
        )
        scores = hold_back(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
    for token, count in Counter(row.output).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    return scores[0]


@given(
    params=CHANGES,
    seed=st.integers(0, 10_000),
    prompt=TOKENS,
    output=st.one_of(st.just([]), TOKENS),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
)
def test_logits_change_as_transformers_changes_them(
    params: SamplingParams,
    seed: int,
    prompt: list[int],
    output: list[int],
    stop_ids: frozenset[int],
) -> None:
    row = Row(params, random_logits(seed)[0], prompt, output, stop_ids=stop_ids)
    others = [Row(everything(), torch.full((VOCAB,), math.nan)), Row(GREEDY, row.logits, prompt)]
    scores = Batch([*others, row], CPU)
    torch.testing.assert_close(
        scores.scores(SamplingFeatures.of([params]))[-1], expected_scores(row)
    )
    # Turning everything on for other requests changes nothing.
    if params.is_greedy:
        torch.testing.assert_close(scores.scores()[-1], expected_scores(row))
        assert torch.equal(scores.scores()[1], row.logits)


def test_presence_and_frequency_leave_the_prompt_alone(device: torch.device) -> None:
    params = SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5)
    row = Row(params, torch.zeros(VOCAB), prompt=[4, 4, 5], output=[5, 6, 6])
    scores = Batch([row], device).scores()[0]
    assert scores[[4, 5, 6, 7]].tolist() == [0.0, -1.5, -2.0, 0.0]


def test_repetition_counts_the_prompt_and_is_not_stronger_for_more(device: torch.device) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    logits = torch.ones(VOCAB)
    logits[6] = -1.0
    row = Row(params, logits, prompt=[4, 4], output=[5, 6])
    assert Batch([row], device).scores()[0][[4, 5, 6, 7]].tolist() == [0.5, 0.5, -2.0, 1.0]


def test_extreme_penalties_make_no_nan(device: torch.device) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 5.0])
    for penalty in (1e-300, 1e300):
        row = Row(SamplingParams(repetition_penalty=penalty), logits, prompt=[0, 1, 2])
        assert not Batch([row], device).scores().isnan().any()


@pytest.mark.parametrize("generated", [0, 1, 2, 3])
def test_stop_ids_wait_until_there_are_enough_tokens(generated: int, device: torch.device) -> None:
    logits = torch.zeros(VOCAB)
    logits[[0, 7]] = 9.0
    params = SamplingParams(temperature=0, min_tokens=2)
    stops = frozenset({0, 7, VOCAB + 3})  # the last is in no logits
    row = Row(params, logits, prompt=[3, 3, 3], output=[5] * generated, stop_ids=stops)
    assert Batch([row], device).tokens() == [1 if generated < 2 else 0]


def test_bias_of_token_zero_and_of_unknown_tokens(device: torch.device) -> None:
    params = SamplingParams(temperature=0, logit_bias={0: 1.5, VOCAB - 1: 2.5, VOCAB: 100.0})
    scores = Batch([Row(params, torch.zeros(VOCAB))], device).scores()[0]
    assert scores[[0, 1, VOCAB - 1]].tolist() == [1.5, 0.0, 2.5]
    assert scores.sum().item() == 4.0


# --- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, MAX_LOGPROBS])
def test_logprobs_are_those_of_the_raw_logits(count: int, device: torch.device) -> None:
    logits = random_logits(8, rows=3)
    rows = [Row(everything(logprobs=count), each, output=[2, 2, 3]) for each in logits]
    output = Batch(rows, device).sample()
    assert output.logprobs is not None
    assert output.logprob_token_ids is not None
    raw = logits.log_softmax(dim=-1)
    ids, tokens = output.logprob_token_ids.cpu(), output.token_ids.cpu()
    assert ids.shape == (3, 1 + min(count, VOCAB))
    assert torch.equal(ids[:, 0], tokens)
    assert torch.equal(ids[:, 1:], raw.sort(descending=True).indices[:, :count])
    torch.testing.assert_close(output.logprobs.cpu(), raw.gather(1, ids))


def test_more_logprobs_than_tokens() -> None:
    output = Batch([Row(SamplingParams(logprobs=20), torch.zeros(6))], CPU).sample()
    assert output.logprobs is not None
    assert output.logprobs.shape == (1, 7)


def test_no_logprobs_unless_asked_for() -> None:
    output = Batch([Row(GREEDY, torch.zeros(6))], CPU).sample()
    assert (output.logprobs, output.logprob_token_ids) == (None, None)


# --- one row and the others ---------------------------------------------------------------------

ANY_PARAMS = st.builds(
    everything,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 10]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([None, {1: 3.0, 2: -3.0}]),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 0, 2]),
)
ROWS = st.lists(
    st.builds(
        Row,
        params=ANY_PARAMS,
        logits=st.integers(0, 1000).map(lambda seed: random_logits(seed)[0]),
        prompt=TOKENS,
        output=st.one_of(st.just([]), TOKENS),
        seed=st.integers(0, 2**63 - 1),
        stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    ),
    min_size=1,
    max_size=7,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=ROWS, data=st.data())
def test_a_row_does_not_see_the_others(
    rows: list[Row], data: st.DataObject, device: torch.device
) -> None:
    alone = [Batch([row], device).tokens()[0] for row in rows]
    assert Batch(rows, device).tokens() == alone
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = Batch([rows[i] for i in order], device, num_state_rows=11)
    assert shuffled.tokens() == [alone[i] for i in order]
    # Padding: rows of request 0 and length 0, with NaN or anything else for logits.
    poison = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e38, 0.0]))
    padded = Batch([*rows, *(Row(GREEDY, torch.full((VOCAB,), poison)) for _ in range(3))], device)
    padded.req_indices[len(rows) :] = 0
    padded.lengths[len(rows) :] = 0
    assert padded.tokens()[: len(rows)] == alone
    assert all(0 <= token < VOCAB for token in padded.tokens())


def test_noise_is_the_same_bits_in_any_row(device: torch.device) -> None:
    for vocab in (1, 7, 1000, 4099):  # odd sizes: rows start at all alignments
        keys = keys_of([5, 2**62 + 3, 5, 8, 5], device)
        positions = torch.tensor([3, 9, 3, 3, 4], device=device)
        draws = exponential_log(keys, positions, vocab)
        assert torch.equal(draws[0], draws[2])
        for row in range(5):
            alone = exponential_log(keys[row : row + 1], positions[row : row + 1], vocab)
            assert torch.equal(draws[row], alone[0])


def test_seeds_and_positions_make_a_difference(device: torch.device) -> None:
    params, logits = SamplingParams(), torch.zeros(50_000)
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
    rows = [Row(params, logits, seed=seed, output=[0] * n) for seed in seeds for n in range(3)]
    tokens = Batch(rows, device).tokens()
    assert len(set(tokens)) == len(tokens)
    assert tokens == Batch(rows, device).tokens()


def test_these_tokens_on_every_device(device: torch.device) -> None:
    logits = torch.arange(VOCAB) % 7 * 0.5
    seeds = [0, 1, 2**40, 2**63 - 1]
    rows = [
        Row(everything(logprobs=None), logits, prompt=[1, 2], output=[3] * n, seed=seed)
        for seed in seeds
        for n in range(4)
    ]
    tokens = torch.tensor(Batch(rows, device).tokens()).reshape(4, 4).tolist()
    assert tokens == [[53, 17, 31, 25], [3, 19, 62, 41], [45, 39, 32, 4], [55, 33, 13, 27]]


def test_inputs_are_left_as_they_are(device: torch.device) -> None:
    batch = Batch(
        [Row(everything(), each, output=[3]) for each in random_logits(2, rows=3)], device
    )
    inputs = batch.logits, batch.req_indices, batch.lengths, batch.token_ids
    copies = [tensor.clone() for tensor in inputs]
    batch.sample()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


# --- inside a graph -----------------------------------------------------------------------------

FEATURES = {
    "greedy": GREEDY,
    "random": SamplingParams(),
    "filter": SamplingParams(top_k=9, top_p=0.8, min_p=0.01),
    "penalty": SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1),
    "bias": SamplingParams(temperature=0, logit_bias={4: 3.0}),
    "min_tokens": SamplingParams(temperature=0, min_tokens=3),
    "logprobs": SamplingParams(logprobs=4),
    "everything": everything(),
}


@pytest.mark.parametrize("params", FEATURES.values(), ids=FEATURES.keys())
def test_a_replay_is_the_eager_run_on_new_inputs(params: SamplingParams, pool: GraphPool) -> None:
    def rows(seed: int) -> list[Row]:
        return [
            Row(
                params,
                logits,
                prompt=[seed % 5, 2, 3],
                output=[(seed + i) % VOCAB for i in range(index + seed % 3)],
                seed=seed * 7919 + index,
                stop_ids=frozenset({seed % VOCAB, 1}),
            )
            for index, logits in enumerate(random_logits(seed, rows=4))
        ]

    batch = Batch(rows(0), pool.device, num_state_rows=9)
    batch.sample()  # warm
    captured = pool.capture(batch.sample)
    seen = set()
    for seed in range(5):
        for index, row in enumerate(rows(seed)):
            batch.put(index, (index * 2 + seed) % 9, row)
        pool.replay(captured.tape)
        eager, replayed = batch.sample(), captured.output
        assert torch.equal(replayed.token_ids, eager.token_ids)
        seen.add(tuple(eager.token_ids.tolist()))
        for name in ("logprobs", "logprob_token_ids"):
            wanted, got = getattr(eager, name), getattr(replayed, name)
            assert (wanted is None) == (got is None)
            assert wanted is None or torch.equal(wanted, got)
    assert len(seen) == 5  # otherwise new inputs would not show


# --- state and features -------------------------------------------------------------------------


def test_features_of_a_batch() -> None:
    of = SamplingFeatures.of
    assert of([]) == of([GREEDY]) == SamplingFeatures()
    assert of([replace(GREEDY, top_k=5, top_p=0.5, min_p=0.5)]) == SamplingFeatures()
    assert of([SamplingParams(top_k=-1)]) == SamplingFeatures(any_random=True)
    for change in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert of([SamplingParams(**change)]) == SamplingFeatures(any_random=True, any_filter=True)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert of([replace(GREEDY, **{name: -0.5 if name[0] != "r" else 0.5})]).any_penalty
    assert of([replace(GREEDY, logit_bias={1: 1.0})]) == SamplingFeatures(any_bias=True)
    assert of([replace(GREEDY, min_tokens=1)]) == SamplingFeatures(any_min_tokens=True)
    assert of([everything()]) == SamplingFeatures(
        any_random=True,
        any_filter=True,
        any_penalty=True,
        any_bias=True,
        any_min_tokens=True,
        num_logprobs=3,
    )


@given(params=st.lists(ANY_PARAMS, max_size=5))
def test_features_of_many_are_the_union(params: list[SamplingParams]) -> None:
    each = [SamplingFeatures.of([one]) for one in params]
    union = SamplingFeatures.of(params)
    for name in ("any_random", "any_filter", "any_penalty", "any_bias", "any_min_tokens"):
        assert getattr(union, name) == any(getattr(one, name) for one in each)
    assert union.num_logprobs == max((one.num_logprobs for one in each), default=-1)
    assert hash(union) == hash(SamplingFeatures.of(reversed(params)))
    state = SamplingState(5, CPU)
    for req_index, one in enumerate(params):
        state.write(req_index, Row(one, torch.zeros(1)).request)
    assert state.features(range(len(params))) == union


@pytest.mark.parametrize("count", [None, 0, 1, MAX_LOGPROBS])
def test_the_number_of_logprobs_survives(count: int | None) -> None:
    bits = feature_bits(SamplingParams(logprobs=count)) | feature_bits(GREEDY)
    assert SamplingFeatures.of_bits(bits).num_logprobs == (-1 if count is None else count)


def test_a_feature_that_is_on_for_others_changes_nothing(device: torch.device) -> None:
    rows = [Row(SamplingParams(), each, seed=3) for each in random_logits(4, rows=4)]
    all_on = SamplingFeatures.of([everything()])
    assert Batch(rows, device).tokens(all_on) == Batch(rows, device).tokens()
    unwritten = Batch(rows, device, num_state_rows=9)
    unwritten.req_indices.zero_()  # a row that no request has had
    assert unwritten.tokens(all_on) == unwritten.logits.argmax(dim=-1).tolist()


def test_a_row_forgets_its_last_request(device: torch.device) -> None:
    before = Row(everything(top_k=1), torch.zeros(VOCAB), seed=5, stop_ids=frozenset({0}))
    batch = Batch([before], device)
    after = Row(GREEDY, torch.zeros(VOCAB))
    batch.put(0, 0, after)
    assert torch.equal(batch.scores()[0].cpu(), torch.zeros(VOCAB))
    assert batch.tokens() == [0]
    few = replace(GREEDY, logit_bias={9: 1.0})
    batch.put(0, 0, Row(replace(GREEDY, logit_bias={5: 2.0, 6: 2.0}), torch.zeros(VOCAB)))
    batch.put(0, 0, Row(few, torch.zeros(VOCAB)))
    scores = batch.scores(SamplingFeatures.of([few]))[0]
    assert scores.nonzero().flatten().tolist() == [9]


def test_the_state_holds_what_was_written(device: torch.device) -> None:
    state = SamplingState(3, device)
    params = everything(
        top_k=10**30,
        min_tokens=10**30,
        max_tokens=None,
        logit_bias={token: float(token % 100) for token in range(MAX_LOGIT_BIAS)},
    )
    stops = frozenset(range(STOP_IDS_WIDTH))
    row = Row(params, torch.zeros(1), prompt=[1, 2, 3], seed=2**63 - 1, stop_ids=stops)
    state.write(1, row.request)
    assert state.temperature.tolist() == pytest.approx([0.0, 0.8, 0.0])
    assert state.top_p.tolist() == pytest.approx([1.0, 0.95, 1.0])
    assert state.min_p.tolist() == pytest.approx([0.0, 0.01, 0.0])
    assert state.presence.tolist() == pytest.approx([0.0, 0.5, 0.0])
    assert state.frequency.tolist() == pytest.approx([0.0, 0.25, 0.0])
    assert state.repetition.tolist() == pytest.approx([1.0, 1.2, 1.0])
    assert state.seed_key.tolist() == [0, spread_seed(2**63 - 1), 0]
    assert state.prompt_len.tolist() == [0, 3, 0]
    assert state.top_k.tolist() == state.min_tokens.tolist() == [0, 2**31 - 1, 0]
    assert state.bias_ids[1].tolist() == list(range(MAX_LOGIT_BIAS))
    assert state.bias_values[1].tolist() == [token % 100 for token in range(MAX_LOGIT_BIAS)]
    assert sorted(state.stop_ids[1].tolist()) == list(range(STOP_IDS_WIDTH))
    assert (state.bias_ids[[0, 2]] == -1).all()
    assert (state.stop_ids[[0, 2]] == -1).all()


def test_more_stop_ids_than_fit() -> None:
    stops = frozenset(range(STOP_IDS_WIDTH + 1))
    state = SamplingState(1, CPU)
    with pytest.raises(ConfigError, match=f"{STOP_IDS_WIDTH + 1} stop and end-of-sequence"):
        state.write(0, Row(everything(), torch.zeros(1), stop_ids=stops).request)
    # Without min_tokens nothing is suppressed, so any number is allowed.
    state.write(0, Row(GREEDY, torch.zeros(1), stop_ids=stops).request)


def test_an_interrupted_write_leaves_nothing_behind() -> None:
    """Interrupted at any line, the next requests of the row get what they ask for."""
    masked = SamplingParams(logit_bias={3: 5.0}, structured_outputs={"regex": "a+"})
    was_interrupted, after = True, 0
    while was_interrupted:
        state = SamplingState(1, CPU, vocab_size=40)
        was_interrupted = _interrupt_write(state, masked, after)
        state.write(0, Row(GREEDY, torch.zeros(1)).request)
        assert (state.bias_ids == -1).all(), f"after {after} lines"
        state.write(0, Row(masked, torch.zeros(1)).request)
        assert state.bias_ids[0, 0] == 3
        assert state.tables.masks.shape == (1, 2), f"after {after} lines"
        after += 1
    assert after > 20


def _interrupt_write(state: SamplingState, params: SamplingParams, after: int) -> bool:
    """Write ``params``, and interrupt that after ``after`` lines, if it runs more of them."""
    num_lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.endswith(("sampling_state.py", "token_masks.py")):
            return None
        num_lines += event == "line"
        if num_lines > after:
            raise KeyboardInterrupt
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        state.write(0, Row(params, torch.zeros(1)).request)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
