"""``AsyncLLM`` on CUDA: an engine that is built and replayed in a thread of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from serving_models import OPTIONS, save_served

from ostinato import LLM, AsyncLLM, SamplingParams, TextDelta

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[1 + (7 * k + j) % 60 for j in range(1 + k % 9)] for k in range(24)]
PARAMS = [SamplingParams(temperature=k % 2, seed=k, max_tokens=20 + k) for k in range(24)]


def test_streams_give_what_generate_gives(tmp_path: Path) -> None:
    path, adapter = save_served(tmp_path)
    options = {**OPTIONS, "device": "cuda"}
    with LLM(path, **options) as llm:
        llm.load_adapter("poet", adapter)
        wanted = llm.generate(PROMPTS, PARAMS, adapter=[None, "poet"] * 12)

    async def ask(served: AsyncLLM, number: int) -> list[TextDelta]:
        stream = served.stream(
            PROMPTS[number], PARAMS[number], adapter="poet" if number % 2 else None
        )
        return [delta async for delta in stream]

    async def ask_all() -> None:
        async with await asyncio.to_thread(AsyncLLM, path, **options) as served:
            await served.load_adapter("poet", adapter)
            leaving = asyncio.create_task(ask(served, 23))
            answers = await asyncio.gather(*(ask(served, number) for number in range(24)))
            leaving.cancel()
            for deltas, output in zip(answers, wanted, strict=True):
                tokens = [token for delta in deltas for token in delta.token_ids]
                assert tokens == output.outputs[0].token_ids
                assert "".join(delta.text for delta in deltas) == output.outputs[0].text
            stats = await served.stats()
            assert (stats.num_running, stats.kv_cache_usage) == (0, 0)
            assert stats.replays["FULL"] > 0

    asyncio.run(ask_all())
