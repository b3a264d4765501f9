"""Runs the server with replicas: a Ray cluster, one deployment, the gateway before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, ModelLoadError
from ostinato.quoting import said
from ostinato.serving.http.run import check_address, listen
from ostinato.serving.http.server_config import ServerConfig
from ostinato.serving.replicas.gateway import create_gateway
from ostinato.serving.replicas.replica import Replica

APP = "ostinato"
_REPLICA = "Replica"
_MOST_REQUESTS = 100_000  # of a replica; its own queue is shorter, and says so
_HEALTH_PERIOD_S = 1.0  # Ray replaces a replica after three failed checks


def serve_replicas(
    engine: EngineConfig,
    config: ServerConfig,
    adapters: Mapping[str, str | Path],
    *,
    num_replicas: int,
) -> None:
    """Start the replicas, and serve until a signal. In the main thread only.

    Uses the Ray cluster that RAY_ADDRESS names, or else starts one on this machine.
    """
    check_address(config.host, config.port)
    with deployed(engine, config, adapters, num_replicas=num_replicas) as handle:
        ask = handle.options(stream=True).answer.remote
        listen(create_gateway(ask, count_running, config), config)


@contextmanager
def deployed(
    engine: EngineConfig,
    config: ServerConfig,
    adapters: Mapping[str, str | Path],
    *,
    num_replicas: int,
) -> Iterator[DeploymentHandle]:
    """A handle of ``num_replicas`` replicas that have started; they end with the block."""
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=engine.show_progress)
    try:
        bundle = resources_of(engine, ray.cluster_resources(), num_replicas)
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            Replica,
            name=_REPLICA,
            num_replicas=num_replicas,
            max_ongoing_requests=_MOST_REQUESTS,
            health_check_period_s=_HEALTH_PERIOD_S,
            # A replica's ranks are processes of its actor, which so has the GPUs of all.
            placement_group_bundles=[bundle],
            placement_group_strategy="STRICT_PACK",
            ray_actor_options={
                "num_cpus": bundle["CPU"],
                "num_gpus": bundle.get("GPU", 0),
            },
            request_router_config=RequestRouterConfig(
                request_router_class="ostinato.serving.replicas.prefix_router:PrefixRouter"
            ),
        )
        application = deployment.bind(engine, config, dict(adapters))
        yield _started(application)
    finally:
        serve.shutdown()
        if started:
            ray.shutdown()


def _started(application: serve.Application) -> DeploymentHandle:
    try:
        return serve.run(application, name=APP, route_prefix=None)
    except RuntimeError as error:
        failed = serve.status().applications.get(APP)
        why = failed.deployments[_REPLICA].message if failed else said(error)
        raise ModelLoadError(f"the replicas did not start: {why}") from error


async def count_running() -> int:
    """How many replicas can answer."""
    return await asyncio.to_thread(_count_running)


def _count_running() -> int:
    application = serve.status().applications.get(APP)
    if application is None:
        return 0
    states = application.deployments[_REPLICA].replica_states
    return int(states.get("RUNNING", 0))


def resources_of(
    engine: EngineConfig, cluster: Mapping[str, float], num_replicas: int
) -> dict[str, float]:
    """What one replica needs: a GPU and a CPU for each rank, or CPUs only."""
    num_ranks = engine.world_size
    if engine.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device is {engine.device!r}, but Ray chooses the GPUs of each replica; use 'cuda'"
        )
    on_gpus = engine.device == "cuda" or (engine.device == "auto" and "GPU" in cluster)
    bundle: dict[str, float] = {"CPU": num_ranks}
    if on_gpus:
        bundle["GPU"] = num_ranks
    for name, amount in bundle.items():
        needed, there = amount * num_replicas, cluster.get(name, 0)
        if needed > there:
            raise ConfigError(
                f"{num_replicas} replicas of {num_ranks} ranks need {needed:g} {name}s, and the "
                f"Ray cluster has {there:g}; use fewer replicas, or add machines to the cluster"
            )
    return bundle
