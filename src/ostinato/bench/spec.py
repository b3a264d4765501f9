"""``ostinato bench spec``: tokens per second with drafts that are right at set rates.

One engine runs all subjects in turns: without drafts, with drafts right at each rate, and with
drafts that are never right. So that the output is known in any precision, the weights of the
model's head are zeroed in memory: all logits are equal, and the first token always wins. Times per
token are differences of long and short generations, as in ``bench decode``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ostinato.bench.timing.measure import about, timed
from ostinato.bench.timing.tpot import time_per_token
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.policy.sizes import check_positive_int
from ostinato.llm import LLM
from ostinato.models.native.decoder import Decoder
from ostinato.sampling_params import SamplingParams
from ostinato.speculative.options import ReplayedDrafts
from ostinato.speculative.replayed import ReplayProposer

SHORT = 17
NO_DRAFTS = "no drafts"


def run(
    config: EngineConfig,
    *,
    batches: Sequence[int] = (1,),
    num_tokens: int = 4,
    acceptances: Sequence[float] = (1.0, 0.7),
    prompt_len: int = 128,
    new_tokens: int = 256,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measure every batch size; a rate of 0, drafts that are never right, is always measured."""
    for name, value in (
        *(("batch size", batch) for batch in batches),
        ("num_tokens", num_tokens),
        ("prompt_len", prompt_len),
        ("new_tokens", new_tokens),
        ("repeats", repeats),
    ):
        check_positive_int(name, value)
    for rate in acceptances:
        if not 0 <= rate <= 1:
            raise ConfigError(f"acceptance must be in [0, 1], got {rate}")
    if not batches:
        raise ConfigError("no batch sizes to measure; give at least one")
    config = replace(
        config,
        max_num_seqs=max(batches),
        # A step has drafts only if they fit, and a free block for each request besides.
        max_model_len=prompt_len + SHORT + new_tokens + 3 * (1 + num_tokens) + config.block_size,
        enable_prefix_caching=False,
        speculative=ReplayedDrafts(num_tokens=num_tokens),
    )
    with LLM.from_config(config) as llm:
        bench = _Bench(llm, prompt_len=prompt_len, new_tokens=new_tokens, repeats=repeats)
        rows = [bench.measure(batch, sorted({0.0, *acceptances})) for batch in batches]
        return {
            **about("spec", llm),
            "num_tokens": num_tokens,
            "prompt_len": prompt_len,
            "new_tokens": new_tokens,
            "repeats": repeats,
            "rows": rows,
        }


class _Bench:
    def __init__(self, llm: LLM, *, prompt_len: int, new_tokens: int, repeats: int) -> None:
        self._llm = llm
        self._prompt_len = prompt_len
        self._new_tokens = new_tokens
        self._repeats = repeats
        self._drafts = llm.engine.scheduler.drafts
        self._with_drafts = self._drafts.num_drafts
        model = llm.engine.model
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"bench spec measures models of the native decoder, not {type(model).__name__}"
            )
        model.head_weight.data.zero_()
        proposer = llm.engine.runner.memory.proposer
        assert isinstance(proposer, ReplayProposer), "as configured"
        self._proposer = proposer

    def measure(self, batch: int, acceptances: Sequence[float]) -> dict[str, Any]:
        source, vocab_size = random.Random(batch), self._llm.engine.model.vocab_size
        prompts = [
            [source.randrange(vocab_size) for _ in range(self._prompt_len)] for _ in range(batch)
        ]
        subjects = {NO_DRAFTS: None, **{_name(rate): rate for rate in acceptances}}
        most = SHORT + self._new_tokens
        longest = self._llm.engine.max_model_len
        self._proposer.texts = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        seconds: dict[str, tuple[list[float], list[float]]] = {n: ([], []) for n in subjects}
        lengths = dict.fromkeys(subjects, 1.0)
        for repeat in range(self._repeats + 1):
            for name, rate in subjects.items():
                self._drafts.stats.reset()
                for which, count in enumerate((SHORT, most)):
                    _, taken = timed(partial(self._generate, prompts, count, rate))
                    if repeat:  # the first warms up
                        seconds[name][which].append(taken)
                lengths[name] = self._drafts.stats.acceptance_length or 1.0
        cells: dict[str, Any] = {}
        for name, (short, long) in seconds.items():
            time = time_per_token(short, long, self._new_tokens)
            cell = {
                "tokens_per_step": lengths[name],
                "tokens_per_s": batch / time.median,
                "tpot_ms": time.median * 1e3,
                "tpot_quartiles_ms": [quartile * 1e3 for quartile in time.quartiles],
                "unusable": time.unusable,
            }
            speedup = cell["tokens_per_s"] / cells.get(NO_DRAFTS, cell)["tokens_per_s"]
            cells[name] = {**cell, "speedup": speedup, "of_ideal": speedup / lengths[name]}
        return {"batch": batch, "subjects": cells}

    def _generate(
        self, prompts: list[list[int]], count: int, rate: float | None
    ) -> list[list[int]]:
        """``count`` tokens of each prompt, with this rate of right drafts (None: no drafts)."""
        none = (0,) * len(self._with_drafts)
        self._drafts.num_drafts = none if rate is None else self._with_drafts
        self._proposer.set_acceptance(rate or 0.0)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return [result.outputs[0].token_ids for result in results]


def _name(rate: float) -> str:
    return f"{rate:.0%} right" if rate else "never right"
