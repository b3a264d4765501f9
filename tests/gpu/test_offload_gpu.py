"""Offload on CUDA in bfloat16: small-M kernels, copies beside them, memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_models import poison
from transformers import LlamaConfig

from ostinato import LLM, GraphConfig, OffloadConfig, SamplingParams
from ostinato.graphs.policy.modes import ModeName

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_LAYERS = 8
PROMPTS = [[(7 * row + 3 * column) % 97 + 3 for column in range(8)] for row in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 24 MB: a copy takes longer than a layer."""
    path = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    ).save_pretrained(path)
    return path


def open_llm(shape: Path, mode: ModeName, offload: OffloadConfig | None) -> LLM:
    """Batches of 8 prompts and of 1 and 8 tokens have graphs; those of 5 are padded or eager."""
    return LLM(
        shape,
        random_weights=True,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=8,
        max_model_len=64,
        kv_cache_memory_bytes="64M",
        show_progress=False,
        enable_prefix_caching=False,
        offload=offload,
        tune="off",
        graphs=GraphConfig(mode=mode, capture_sizes=None if mode == "NONE" else [1, 8, 64]),
    )


def in_random_order(llm: LLM, *, poisoned: bool) -> Iterator[list[Any]]:
    """The deltas of each step of some calls, the same ones every time."""
    order = random.Random(0)
    for _ in range(4):
        prompts = order.sample(PROMPTS, order.choice([1, 5, 8]))
        for delta in llm.stream(prompts, GREEDY):
            yield [delta.prompt_index, *delta.token_ids]
            if poisoned:
                poison(llm)


@pytest.mark.parametrize(
    ("mode", "layers"),
    [
        ("NONE", (2, 1, 1)),
        ("PIECEWISE", (1, 1, 2)),
        ("FULL", (4, 3, 2)),
        ("FULL_DECODE_ONLY", (1, 1, 1)),
        ("FULL_AND_PIECEWISE", (2, 1, 1)),
        ("FULL_AND_FULL", (4, 3, 1)),
    ],
)
def test_the_same_tokens_as_without(
    shape: Path, mode: ModeName, layers: tuple[int, int, int]
) -> None:
    group, offloaded, prefetch = layers
    offload = OffloadConfig(group=group, offloaded=offloaded, prefetch=prefetch)
    with open_llm(shape, mode, None) as llm:
        wanted = list(in_random_order(llm, poisoned=False))
    with open_llm(shape, mode, offload) as llm:
        assert list(in_random_order(llm, poisoned=True)) == wanted
        with torch.cuda.stream(torch.cuda.Stream()):
            assert list(in_random_order(llm, poisoned=True)) == wanted


# In its own process: what other tests leave behind is freed at any time, and would count.
LOADING = """
import gc, json, sys
import torch
from ostinato import OffloadConfig
from ostinato.loading.load import load_model

cuda = torch.device("cuda", 0)

def requested(which):
    # Bytes as asked for: torch's blocks may be up to 1 MiB larger, each of them.
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

def load(offload):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    model = load_model(
        sys.argv[1], device=cuda, dtype=torch.bfloat16, random_weights=True, offload=offload
    ).model
    gc.collect()
    return model, requested("current") - before, requested("peak") - before

offload = OffloadConfig(group=4, offloaded=3, prefetch=1)
for each in (None, offload):  # makes what a process makes once, such as workspaces
    load(each)
_, plain, _ = load(None)
model, resident, peak = load(offload)
offloader = model.offloader
print(json.dumps({
    "plain": plain,
    "resident": resident,
    "peak": peak,
    "saved": offloader.host_bytes - offloader.slot_bytes,
    "slot": offloader.slot_bytes,
    "pinned": all(host.is_pinned() for host in offloader.host),
}))
"""


def test_loading_takes_only_the_memory_of_resident_layers(shape: Path) -> None:
    """At no time, and not even while weights are drawn; the rest is pinned."""
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(shape)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["plain"] - found["resident"] - found["saved"]) < 2**20, found
    assert found["peak"] < found["resident"] + 2 * found["slot"], found
    assert found["pinned"]


def test_memory_can_be_pinned_again(shape: Path) -> None:
    for _ in range(3):
        with open_llm(shape, "NONE", OffloadConfig(group=1, offloaded=1, prefetch=1)) as llm:
            llm.generate(PROMPTS[:1], GREEDY)
