"""``verify=`` as users write it, and which steps it samples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ostinato import ConfigError
from ostinato.graphs.policy.verify import VerifyPolicy


def test_parsing() -> None:
    assert not VerifyPolicy.parse("off")
    assert not VerifyPolicy.parse(None)
    assert VerifyPolicy.parse("capture") == VerifyPolicy(at_capture=True)
    assert VerifyPolicy.parse("sample:0.25") == VerifyPolicy(sample_rate=0.25)
    both = VerifyPolicy(at_capture=True, sample_rate=1e-3)
    assert VerifyPolicy.parse("capture, sample:0.001") == both
    assert VerifyPolicy.parse("sample:0.001,capture") == both


@pytest.mark.parametrize("text", ["on", "", "capture,capture", "sample", "sample:x", 3, np.ones(2)])
def test_unknown_values_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"unknown verify .*; choose 'off', 'capture'"):
        VerifyPolicy.parse(text)


@pytest.mark.parametrize("rate", ["0", "-0.1", "1.5", "nan"])
def test_rates_outside_their_range_are_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match=rf"samples a fraction of {rate}; give one in \(0, 1\]"):
        VerifyPolicy.parse(f"sample:{rate}")


def test_steps_are_sampled_evenly_and_alike_everywhere() -> None:
    policy = VerifyPolicy(sample_rate=0.01)
    sampled = [step for step in range(20_000) if policy.samples(step)]
    assert 150 < len(sampled) < 250
    assert sampled == [
        step for step in range(20_000) if VerifyPolicy.parse("sample:0.01").samples(step)
    ]
    gaps = [after - before for before, after in itertools.pairwise(sampled)]
    assert min(gaps) < 20 < 300 < max(gaps)  # not a stride, which could follow a pattern of steps
    assert all(VerifyPolicy(sample_rate=1).samples(step) for step in range(1000))
    assert not any(VerifyPolicy().samples(step) for step in range(1000))
