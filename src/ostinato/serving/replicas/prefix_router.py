"""``PrefixRouter``: a Ray Serve request router that asks ``PrefixPlacement``.

Ray creates it beside the handle, in the server's process, and calls it in one loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ostinato.serving.replicas.prefix_placement import PrefixPlacement
from ostinato.serving.replicas.prompt_prefix import PromptPrefix

_MOST_S = 5.0  # for a replica to take a request; its client may leave before


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Requests say what they are about in their keyword arguments, as ``Replica.answer`` has
    them."""

    def initialize_state(self, **_: Any) -> None:
        self._placement: PrefixPlacement[ReplicaID] = PrefixPlacement()
        # Requests are counted where they were sent until the replica has taken them.
        self._sent: dict[str, tuple[ReplicaID, PromptPrefix, asyncio.TimerHandle]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas, each a rank of its own: the next is tried if one is full."""
        self._loop = asyncio.get_running_loop()
        if pending_request is not None:  # or Ray asks again at once, for ever, if all are full
            pending_request.routing_context.should_backoff = True
        by_id = {each.replica_id: each for each in candidate_replicas}
        names = sorted(by_id, key=lambda each: each.unique_id)
        asked = {} if pending_request is None else pending_request.kwargs
        if (number := asked.get("number")) is not None and names:
            return [[by_id[names[number % len(names)]]]]
        avoided = asked.get("avoided", frozenset())
        # If none is left, Ray asks again until it has started another.
        names = [each for each in names if each.unique_id not in avoided]
        prefix = asked.get("prefix", PromptPrefix())
        ranked = self._placement.ranked(names, prefix)
        if ranked and pending_request is not None:
            self._send(pending_request.metadata.internal_request_id, ranked[0], prefix)
        return [[by_id[each]] for each in ranked]

    def _send(self, request: str, replica: ReplicaID, prefix: PromptPrefix) -> None:
        self._taken(request)  # it may be sent again
        self._placement.begin(replica, prefix)
        forget = self._loop.call_later(_MOST_S, self._taken, request)
        self._sent[request] = replica, prefix, forget

    def _taken(self, request: str) -> None:
        if request in self._sent:
            replica, prefix, forget = self._sent.pop(request)
            forget.cancel()
            self._placement.end(replica, prefix)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        prefix = pending_request.kwargs.get("prefix", PromptPrefix())
        self._taken(pending_request.metadata.internal_request_id)
        self._placement.begin(replica_id, prefix)
        loop = self._loop
        end = partial(self._placement.end, replica_id, prefix)
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(end))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._placement.keep([each.replica_id for each in replicas])
