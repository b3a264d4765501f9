"""The public self-test: every planted fault is found, named and survived."""

from __future__ import annotations

import re

import pytest
import torch

from ostinato.graphs.trust.shadow.report import Cause
from ostinato.self_test import FAULTS, self_test


@pytest.mark.slow
def test_every_planted_fault_is_named(device: torch.device) -> None:
    results = self_test(str(device))
    assert [(each.fault, each.mode) for each in results if not each.passed] == []
    assert {each.fault for each in results} == {fault.name for fault in FAULTS}
    texts = {each.fault: str(each.mismatches[0]) for each in results}
    # By the call's argument, or by the ledger where a kernel was launched around the dispatcher.
    assert re.search(r"parameter 'layers\.1\.qkv_proj\.weight',? at 0x", texts["a moved parameter"])
    assert "other is 2.0 now and 1.0 in the graph" in texts["a host value baked in"]
    assert Cause.PADDING.value in texts["a padding leak"]
    assert "aten.mean.dim" in texts["a padding leak"]
    assert "aten.cumsum.default" in texts["a kernel whose result depends on the batch"]
    assert re.search("KV cache 'layer 1, keys',? at 0x", texts["a stale KV pointer"])
