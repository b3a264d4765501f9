"""The key of a graph, the question of dispatch and its answer: equality, hashing, validation."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

from ostinato.errors import ConfigError
from ostinato.graphs.policy.descriptor import BatchDescriptor, BatchShape, Choice, Reason
from ostinato.graphs.policy.modes import CUDAGraphMode

VARIANTS = [
    BatchDescriptor(8),
    BatchDescriptor(16),
    BatchDescriptor(8, num_reqs=8),
    BatchDescriptor(8, num_reqs=4),
    BatchDescriptor(8, num_reqs=8, uniform=True),
    BatchDescriptor(8, num_reqs=4, uniform=True, query_len=2),
    BatchDescriptor(8, has_lora=True, num_active_loras=1),
    BatchDescriptor(8, has_lora=True, num_active_loras=2),
]


def test_defaults_are_the_piecewise_key() -> None:
    key = BatchDescriptor(8)
    assert (key.num_reqs, key.uniform, key.has_lora, key.num_active_loras) == (
        None,
        False,
        False,
        0,
    )
    assert key.query_len is None


def test_every_field_tells_keys_apart() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS)
    for index, key in enumerate(VARIANTS):
        assert [other == key for other in VARIANTS].index(True) == index


@pytest.mark.parametrize("key", VARIANTS, ids=repr)
def test_equal_keys_find_each_other(key: BatchDescriptor) -> None:
    twin = dataclasses.replace(key)
    assert twin is not key
    assert twin == key
    assert hash(twin) == hash(key)
    assert {key: "graph"}[twin] == "graph"


def test_hash_survives_the_way_to_another_process() -> None:
    key = BatchDescriptor(8, num_reqs=None)
    code = (
        "import pickle, sys; from ostinato import BatchDescriptor;"
        "key = pickle.loads(bytes.fromhex(sys.argv[1])); print(key in {BatchDescriptor(8)})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(key).hex()],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert found.stdout.strip() == "True"


def test_replace_computes_a_new_hash() -> None:
    larger = dataclasses.replace(BatchDescriptor(8), num_tokens=16)
    assert hash(larger) == hash(BatchDescriptor(16))


def test_keys_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchDescriptor(8).num_tokens = 9  # type: ignore[misc]


def test_a_number_of_tokens_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"BatchDescriptor\.num_tokens must be .*, got None"):
        BatchDescriptor(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8"])
@pytest.mark.parametrize("name", ["num_tokens", "num_reqs", "query_len"])
def test_numbers_must_be_positive_ints(name: str, value: object) -> None:
    fields = {"num_tokens": 8, name: value}
    with pytest.raises(ConfigError, match=rf"BatchDescriptor\.{name} must be a positive int"):
        BatchDescriptor(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("has_lora", "count"), [(True, 0), (False, 1), (False, -1), (True, -1)])
def test_has_lora_agrees_with_the_count(has_lora: bool, count: int) -> None:
    with pytest.raises(ConfigError, match=f"has_lora={has_lora} with num_active_loras={count};"):
        BatchDescriptor(8, has_lora=has_lora, num_active_loras=count)


def test_repr_shows_the_fields_and_not_the_hash() -> None:
    text = repr(BatchDescriptor(8, num_reqs=4, uniform=True))
    assert "num_tokens=8, num_reqs=4, uniform=True" in text
    assert "_hash" not in text


def test_shape_defaults() -> None:
    shape = BatchShape(num_tokens=8, num_reqs=4, max_query_len=2)
    assert shape.num_active_loras == 0
    assert shape.attention_blocks_full is False


def test_reasons_to_run_through_a_graph() -> None:
    graphs = {reason for reason in Reason if not reason.is_eager}
    assert graphs == {
        Reason.UNIFORM_DECODE,
        Reason.MIXED,
        Reason.FULL_BLOCKED,
        Reason.PIECES_ON_ANOTHER_RANK,
        Reason.MIXED_ON_ANOTHER_RANK,
    }


def test_choice_is_a_value() -> None:
    fields = {"mode": CUDAGraphMode.FULL, "descriptor": BatchDescriptor(8, num_reqs=8)}
    choice = Choice(**fields, reason=Reason.MIXED)  # type: ignore[arg-type]
    assert choice == Choice(**fields, reason=Reason.MIXED)  # type: ignore[arg-type]
    assert choice != Choice(**fields, reason=Reason.UNIFORM_DECODE)  # type: ignore[arg-type]
    assert choice.padded_num_tokens == 8
