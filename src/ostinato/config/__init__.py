"""The user's options: ``EngineConfig`` and ``GraphConfig``, validated on construction."""

from ostinato.config.engine_config import CPU_KV_CACHE_BYTES as CPU_KV_CACHE_BYTES
from ostinato.config.engine_config import EngineConfig as EngineConfig
from ostinato.config.graph_config import GraphConfig as GraphConfig
from ostinato.config.memory_size import parse_bytes as parse_bytes
