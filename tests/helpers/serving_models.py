"""A tiny model that talks, the options of the engines that serve it, and a server in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters import save_adapter
from tiny_models import save_talking

from ostinato import GraphConfig

TEMPLATE = (
    "w7 {% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if tools %}w{{ tools | length }} {% endif %}{{ style }} w9"
)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "kv_cache_memory_bytes": "4M",
    "show_progress": False,
    "enable_lora": True,
    "max_loras": 2,
    "graphs": GraphConfig(capture_sizes=[1, 4, 8]),
}


def save_served(directory: Path) -> tuple[str, str]:
    """The directories of a checkpoint and of an adapter for it."""
    model = save_talking(directory / "model", TEMPLATE)
    save_adapter(directory / "adapter", model)
    return str(model), str(directory / "adapter")


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of a server that runs ``app`` in a thread."""
    import uvicorn  # not there where only CUDA code is tested

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
