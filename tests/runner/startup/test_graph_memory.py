"""Memory of graphs: estimated before the capture, taken by it, and kept within a budget."""

import pytest

from ostinato import LLM, GraphConfig
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.policy.graph_memory import GraphMemory, GraphMemoryReport

SIZES = [1, 2, 4, 8, 16, 64, 512]
SETTINGS = {
    "random_weights": True,
    "device": "cpu",
    "kv_cache_memory_bytes": "8M",
    "show_progress": False,
}


def tiny(**options):
    return LLM("tiny", graphs=GraphConfig(capture_sizes=SIZES), **SETTINGS, **options)


def test_every_byte_is_counted_where_it_is_taken():
    with tiny() as llm:
        runner, taken = llm.engine.runner, llm.graph_memory.taken
        report = runner.capture_report
        assert taken.pool == runner.pool.num_bytes == report.num_bytes
        assert taken.executable == report.executable_bytes
        assert all(entry.executable_bytes > 0 for entry in report.entries)
        assert runner.capture_bytes == taken.total == taken.pool + taken.executable


def test_the_estimate_is_close():
    with tiny() as llm:
        estimated, taken = llm.graph_memory.estimated, llm.graph_memory.taken
        assert estimated.pool == pytest.approx(taken.pool, rel=0.2)
        assert estimated.executable == pytest.approx(taken.executable, rel=0.2)


@pytest.mark.slow
def test_a_budget_leaves_sizes_out_and_changes_no_token(caplog):
    prompts = [[1 + number, 2, 3] for number in range(6)]
    with tiny() as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(prompts)]
        whole = llm.graph_memory
    assert (whole.budget, whole.dropped_decode, whole.dropped_mixed) == (None, (), ())
    for budget in (300 * 2**10, 60 * 2**10):
        caplog.clear()
        with tiny(graph_memory=budget) as llm:
            memory, plan = llm.graph_memory, llm.engine.runner.plan
            tokens = [each.outputs[0].token_ids for each in llm.generate(prompts)]
        assert tokens == expected
        assert memory.estimated.total <= budget == memory.budget
        assert memory.taken.total <= 1.2 * budget
        # What is left out is named, and the rest is there.
        captured = {True: set(), False: set()}
        for entry in plan.entries:
            captured[entry.descriptor.uniform].add(entry.descriptor.num_tokens)
        assert captured[True] == {1, 2, 4, 8, 16} - set(memory.dropped_decode)
        assert captured[False] == set(SIZES) - set(memory.dropped_mixed)
        assert 512 in memory.dropped_mixed
        assert f"mixed sizes {list(memory.dropped_mixed)}" in caplog.text


def test_no_size_is_left_out_of_a_large_budget():
    with tiny(graph_memory="1GiB") as llm:
        memory = llm.graph_memory
    assert (memory.dropped_decode, memory.dropped_mixed) == ((), ())


def test_a_budget_below_the_smallest_graph_is_refused():
    with pytest.raises(ConfigError, match=r"graph_memory 1\.0 KiB is too small for any graph"):
        tiny(graph_memory="1K")


def test_a_budget_for_two_models_is_refused():
    with pytest.raises(ConfigError, match="does not work with shift_parallel_threshold"):
        EngineConfig(
            graph_memory="1GiB", ulysses_sequence_parallel_size=2, shift_parallel_threshold=8
        )


def test_sizes_of_mixed_batches_are_options():
    graphs = GraphConfig(capture_sizes=[1, 4], mixed_capture_sizes=[32])
    with LLM("tiny", graphs=graphs, **SETTINGS) as llm:
        plan = llm.engine.runner.plan
    assert (plan.sizes, plan.mixed_sizes) == ((1, 4), (32,))
    with pytest.raises(ConfigError, match="FULL_DECODE_ONLY has no separate graphs of mixed"):
        LLM(
            "tiny", graphs=GraphConfig(mode="FULL_DECODE_ONLY", mixed_capture_sizes=[8]), **SETTINGS
        )


@pytest.mark.parametrize(
    ("estimated", "taken", "is_close"),
    [(132, 100, True), (133, 100, False), (68, 100, True), (1100, 1000, True), (1101, 1000, False)],
)
def test_how_close_an_estimate_must_be(estimated, taken, is_close):
    report = GraphMemoryReport(
        estimated=GraphMemory(pool=estimated * 2**20),
        taken=GraphMemory(pool=taken * 2**20, driver=2**40),
    )
    assert report.is_as_estimated is is_close
    assert report.is_within_estimate is (is_close or taken < estimated)
