"""One model and one engine for all tests of a module that ask over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from serving_models import OPTIONS, listening, save_served

from ostinato import LLM, AsyncLLM
from ostinato.serving.http.server_config import ServerConfig


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A checkpoint, and an adapter for it."""
    return save_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def llm(paths: tuple[str, str]) -> Iterator[LLM]:
    """What the answers are compared with."""
    with LLM(paths[0], **OPTIONS) as llm:
        llm.load_adapter("poet", paths[1])
        yield llm


@pytest.fixture(scope="module")
def engine(paths: tuple[str, str]) -> Iterator[AsyncLLM]:
    with AsyncLLM(paths[0], **OPTIONS) as engine:
        asyncio.run(engine.load_adapter("poet", paths[1]))
        yield engine


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    from ostinato.serving.http.app import create_app  # needs FastAPI

    with listening(create_app(engine, ServerConfig(served_model_name="tiny"))) as url:
        yield url
