"""``WeightGroup``: a trainer sends weights to engines; all of them arrive, or nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_models import TINY_NATIVE
from weight_sets import WeightSets, free_address, join, open_llm, tokens_of

from ostinato import (
    LLM,
    ClosedError,
    ConfigError,
    ModelLoadError,
    WeightGroup,
    open_weights,
    share_weights,
)
from ostinato.errors import CollectiveError


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> WeightSets:
    return WeightSets(TINY_NATIVE["llama"](), tmp_path_factory.mktemp("llama"), "ab")


@pytest.fixture(scope="module")
def llm(sets: WeightSets) -> Iterator[LLM]:
    with open_llm(sets.paths["a"]) as llm:
        yield llm


@pytest.mark.slow
def test_all_and_some_weights_from_a_trainer(llm: LLM, sets: WeightSets) -> None:
    a, b = sets.of("a"), sets.of("b")
    some = {name: each.bfloat16().float() for name, each in b.items() if "norm" in name}
    sent: list[tuple[Any, list[list[int]]]] = [
        (b, sets.tokens("b")),
        (list(a.items()), sets.tokens("a")),
        (iter(some.items()), sets.mixed_tokens({**a, **some})),
    ]
    trainer, engine = join()
    with ThreadPoolExecutor(1) as thread, trainer, engine:
        for weights, expected in sent:
            sending = thread.submit(trainer.send, weights)
            llm.update_weights(engine)
            sending.result()
            assert tokens_of(llm) == expected
    with pytest.raises(ClosedError, match="weight group is closed"):
        trainer.send(b)


@pytest.mark.slow
def test_a_mismatch_changes_nothing_and_the_group_goes_on(llm: LLM, sets: WeightSets) -> None:
    llm.update_weights(sets.paths["a"])
    b = sets.of("b")
    wrong_shape = {**b, "model.norm.weight": torch.ones(3)}
    unknown = {**b, "model.nom.weight": torch.ones(3)}
    trainer, engine = join()
    with ThreadPoolExecutor(1) as thread, trainer, engine:
        for weights, what in ((wrong_shape, "model.norm.weight"), (unknown, "model.nom.weight")):
            sending = thread.submit(trainer.send, weights)
            with pytest.raises(ModelLoadError, match=what):
                llm.update_weights(engine)
            sending.result()
            assert tokens_of(llm) == sets.tokens("a")
        sending = thread.submit(trainer.send, b)
        llm.update_weights(engine)
        sending.result()
        assert tokens_of(llm) == sets.tokens("b")


def test_engines_of_one_trainer(sets: WeightSets) -> None:
    b = sets.of("b")
    trainer, *engines = join(world_size=3)
    with ThreadPoolExecutor(3) as threads:
        sending = threads.submit(trainer.send, b)
        received = [*threads.map(lambda group: {**dict(group)}, engines)]
        sending.result()
    for each in received:
        assert each.keys() == b.keys()
        assert all(torch.equal(each[name], b[name]) for name in b)


def test_who_sends_and_who_receives() -> None:
    trainer, engine = join()
    with pytest.raises(ConfigError, match="only rank 0 sends weights; this is rank 1"):
        engine.send({})
    with pytest.raises(ConfigError, match=r"rank 0 sends weights.*call send\(\)"):
        next(iter(trainer))
    with pytest.raises(ConfigError, match=r"weight ids is torch.int64; send torch.float64"):
        trainer.send({"ids": torch.ones(2, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "no weights to send"),
        ({"a": 3}, "weight a is 3, not a tensor"),
        ([1, 2], "got 1 in place of a pair"),
        (None, "got None"),
        ({"a": torch.ones(2, device="meta")}, "on the device meta"),
        ([("a", torch.ones(2))] * 2, "a occurs twice in the weights to send"),
    ],
)
def test_refused_before_any_rank_is_told(weights: Any, message: str) -> None:
    """Else the others would wait for tensors that never come."""
    trainer, engine = join()
    with pytest.raises(ConfigError, match=message):
        trainer.send(weights)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(trainer.send, {"b": torch.ones(3)})
        assert list(dict(engine)) == ["b"]
        sending.result()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "numbered from 0; got rank 2 of 2"),
        ({"rank": "0"}, "numbered from 0; got rank '0' of 2"),
        ({"rank": 0, "address": "127.0.0.1:99999"}, "address must be host:port"),
        ({"rank": 0, "address": None}, "address must be host:port"),
        ({"rank": 0, "timeout_s": float("nan")}, "timeout_s must be a number of seconds above 0"),
        ({"rank": 0, "timeout_s": -1}, "timeout_s must be a number of seconds above 0"),
        ({"rank": 0, "world_size": 1}, "at least 2 ranks"),
        ({"rank": 0, "address": "nowhere"}, "address must be host:port"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightGroup(**{"address": "127.0.0.1:1", "world_size": 2, **options})


@pytest.mark.slow
def test_a_rank_that_never_comes() -> None:
    with pytest.raises(
        CollectiveError, match=r"the ranks did not meet: .*check that all ranks run"
    ):
        WeightGroup(free_address(), rank=0, world_size=2, timeout_s=0.5)


# --- CUDA IPC handles (tests/gpu has what needs two processes) ------------------------------------


def test_handles_are_of_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"weight w is torch.float32 on cpu; share_weights takes"):
        share_weights({"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("x", "not one of share_weights"),
        (None, "not one of share_weights"),
        ("[" * 100_000, "not one of share_weights"),
        ("[]", "whose format is ostinato-weights-1"),
        ('{"format": "ostinato-weights-1"}', "are damaged"),
        ('{"format": "ostinato-weights-1", "weights": {"w": {}}}', "are damaged"),
        (
            '{"format": "ostinato-weights-1", "weights": {"w": {"device": "GPU-0"}}}',
            "weight w is on the GPU GPU-0, which this process does not see",
        ),
    ],
)
def test_messages_that_are_none(message: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        open_weights(message)
