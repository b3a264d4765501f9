"""Encoders in bfloat16: flash attention over packed sequences, and embeddings through graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_encoders import PROMPTS, open_encoder, save_encoder

from ostinato import set_forward_context
from ostinato.attention import packed
from ostinato.attention.packed import PackedBatch, PackedSpec, attend_packed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NAN = float("nan")
LENGTHS = [1, 7, 7, 130, 64, 3]


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (5, 5), (5, 0)])
def test_flash_attention_is_that_of_each_length(
    left: int | None, right: int | None, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, total = torch.device("cuda", 0), sum(LENGTHS)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(total + 9, heads, 64, device=device, dtype=torch.bfloat16)
        for heads in (4, num_kv_heads, num_kv_heads)
    )
    for states in (query, key, value):
        states[total:] = NAN
    spec = PackedSpec(scale=0.125, left=left, right=right)

    def attend(*states: torch.Tensor) -> torch.Tensor:
        with set_forward_context(attn_metadata=PackedBatch(LENGTHS, device)):
            return attend_packed(spec, *states)

    assert packed._has_flash(query, value)
    out = attend(query, key, value)
    monkeypatch.setattr(packed, "_has_flash", lambda *_: False)
    expected = attend(query.float(), key.float(), value.float())
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    assert not out.isnan().any()


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "qwen3", "mistral"])
def test_embeddings_in_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    model: Any = save_encoder(tmp_path, name).bfloat16().float()  # the same weights
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([prompt]))[0][0].mean(0) for prompt in PROMPTS]
    with open_encoder(tmp_path, "cuda", mode=mode, dtype="bfloat16") as llm:
        results = llm.embed(PROMPTS, pooling="mean")
        assert (llm.pooling.runner.stats.hits > 0) == (mode == "PIECEWISE")
    vectors = torch.stack([result.embedding for result in results])
    assert F.cosine_similarity(vectors, torch.stack(states)).min() > 0.999


def test_replays_equal_eager_to_the_bit_in_bfloat16(tmp_path: Path) -> None:
    save_encoder(tmp_path, "modernbert")
    prompts = [PROMPTS[2], PROMPTS[3]]  # 32 tokens: no padding
    vectors = []
    for mode in ("NONE", "PIECEWISE"):
        with open_encoder(tmp_path, "cuda", mode=mode, dtype="bfloat16") as llm:
            vectors.append(torch.stack([each.embedding for each in llm.embed(prompts)]))
    assert torch.equal(*vectors)
