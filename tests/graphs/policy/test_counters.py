"""The compilation counter: copies, expectations that can fail, and uncounted blocks."""

from __future__ import annotations

import dataclasses

import pytest

import ostinato
from ostinato.errors import ConfigError
from ostinato.graphs.policy.counters import CompilationCounter, compilation_counter

CONTRACT_FIELDS = {
    "num_models_seen",
    "num_graphs_seen",
    "num_piecewise_graphs_seen",
    "num_piecewise_capturable_graphs_seen",
    "num_backend_compilations",
    "num_inductor_compiles",
    "num_eager_compiles",
    "num_gpu_runner_capture_triggers",
    "num_cudagraph_captured",
}


def test_has_the_fields_of_the_contract_and_starts_at_zero() -> None:
    counts = dataclasses.asdict(CompilationCounter())
    assert counts.keys() >= CONTRACT_FIELDS
    assert set(counts.values()) == {0}


def test_there_is_one_for_the_process() -> None:
    assert ostinato.compilation_counter is compilation_counter


def test_clone_stays_as_it_is() -> None:
    counter = CompilationCounter(num_graphs_seen=2)
    copy = counter.clone()
    counter.num_graphs_seen += 1
    assert copy == CompilationCounter(num_graphs_seen=2)
    assert counter.num_graphs_seen == 3


def test_expect_passes_on_the_exact_growth() -> None:
    counter = CompilationCounter(num_cudagraph_captured=5)
    with counter.expect(num_cudagraph_captured=2, num_graphs_seen=0):
        counter.num_cudagraph_captured += 2
        counter.num_models_seen += 1  # not named, so free to change
    assert counter.num_cudagraph_captured == 7


@pytest.mark.parametrize("grown", [0, 1, 3, -2])
def test_expect_fails_with_field_before_after_and_expected(grown: int) -> None:
    counter = CompilationCounter(num_cudagraph_captured=5)
    message = rf"num_cudagraph_captured: was 5, is {5 + grown}, expected 7 \(\+2\)"
    with pytest.raises(AssertionError, match=message), counter.expect(num_cudagraph_captured=2):
        counter.num_cudagraph_captured += grown


def test_expect_names_every_wrong_field_and_no_other() -> None:
    counter = CompilationCounter()
    with (
        pytest.raises(AssertionError) as caught,
        counter.expect(num_graphs_seen=1, num_models_seen=1, num_eager_compiles=1),
    ):
        counter.num_models_seen += 1
    message = str(caught.value)
    assert "num_graphs_seen: was 0, is 0, expected 1" in message
    assert "num_eager_compiles: was 0, is 0, expected 1" in message
    assert "num_models_seen" not in message


def test_expect_does_not_hide_an_exception() -> None:
    with pytest.raises(KeyError), CompilationCounter().expect(num_graphs_seen=1):
        raise KeyError("model")


def test_expect_of_an_unknown_field() -> None:
    with (
        pytest.raises(ConfigError, match=r"no such counter: \['num_graph_seen'\]; known: .*num_gr"),
        CompilationCounter().expect(num_graph_seen=0),
    ):
        pass


def test_paused_block_does_not_count() -> None:
    counter = CompilationCounter(num_graphs_seen=1)
    with counter.paused():
        for name in CONTRACT_FIELDS:
            setattr(counter, name, 9)
    assert counter == CompilationCounter(num_graphs_seen=1)
    counter.num_graphs_seen += 1
    assert counter.num_graphs_seen == 2


def test_paused_block_that_raises_does_not_count_either() -> None:
    counter = CompilationCounter()

    def profile() -> None:
        with counter.paused():
            counter.num_graphs_seen += 1
            raise KeyError("model")

    with pytest.raises(KeyError):
        profile()
    assert counter == CompilationCounter()


def test_paused_inside_expect() -> None:
    counter = CompilationCounter()
    with counter.expect(num_cudagraph_captured=1):
        with counter.paused():
            counter.num_cudagraph_captured += 13
        counter.num_cudagraph_captured += 1
