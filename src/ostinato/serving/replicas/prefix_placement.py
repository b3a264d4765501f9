"""``PrefixPlacement``: which replica gets a request, by what its KV cache has and by its load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from ostinato.serving.replicas.prompt_prefix import PromptPrefix

Replica = TypeVar("Replica", bound=Hashable)

_MOST_KEYS = 50_000  # of all replicas; the oldest are forgotten
_OUTPUT = 512  # what generating adds to a request's cost, in characters


class PrefixPlacement(Generic[Replica]):
    """Ranks replicas by cost: the text of their unfinished requests, less what of the new request
    they have seen before. So a request goes where its prefix is cached, unless that replica has
    more work than the prefix saves. For one thread."""

    def __init__(self) -> None:
        self._loads: dict[Replica, int] = {}
        self._seen: OrderedDict[tuple[Replica, bytes], None] = OrderedDict()

    def ranked(self, replicas: Sequence[Replica], prefix: PromptPrefix) -> list[Replica]:
        """``replicas``, the best first; of equals, those that come first."""
        return sorted(replicas, key=lambda each: self._cost(each, prefix))

    def _cost(self, replica: Replica, prefix: PromptPrefix) -> int:
        num_seen = 0
        for key in prefix.keys:
            if (replica, key) not in self._seen:
                break
            num_seen += 1
        return self._loads.get(replica, 0) - num_seen * prefix.block_size

    def begin(self, replica: Replica, prefix: PromptPrefix) -> None:
        """A replica has got a request."""
        self._loads[replica] = self._loads.get(replica, 0) + prefix.size + _OUTPUT
        for key in prefix.keys:
            self._seen[replica, key] = None
            self._seen.move_to_end((replica, key))
        while len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)

    def end(self, replica: Replica, prefix: PromptPrefix) -> None:
        """The request has ended, whichever way."""
        if replica in self._loads:
            self._loads[replica] -= prefix.size + _OUTPUT

    def keep(self, replicas: Sequence[Replica]) -> None:
        """Forget all other replicas."""
        kept = set(replicas)
        self._loads = {each: load for each, load in self._loads.items() if each in kept}
        for key in [key for key in self._seen if key[0] not in kept]:
            del self._seen[key]
