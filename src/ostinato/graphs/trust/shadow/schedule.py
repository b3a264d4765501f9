"""Decides which steps are compared, alike on all ranks that run the same steps."""

from __future__ import annotations

from collections.abc import Hashable

from ostinato.graphs.policy.verify import VerifyPolicy


class ShadowSchedule:
    """Counts steps, and samples as ``policy`` says.

    After a mismatch every graph is compared again in its next step: what is wrong with one is
    often wrong with others.
    """

    def __init__(self, policy: VerifyPolicy) -> None:
        self.policy = policy
        self.num_steps = 0
        self.samples_this = False  # the last step counted is a sampled one
        self._trusted: set[Hashable] | None = None  # since the last mismatch; None: there was none

    def takes(self, key: Hashable) -> bool:
        """Whether the next step is compared; it replays the graph of ``key``, or none (None)."""
        self.samples_this = self.policy.samples(self.num_steps)
        self.num_steps += 1
        suspect = self._trusted is not None and key not in self._trusted
        return key is not None and (self.samples_this or suspect)

    def note(self, key: Hashable, *, differs: bool) -> None:
        """The graph of ``key`` was compared."""
        if differs:
            self._trusted = set()
        elif self._trusted is not None:
            self._trusted.add(key)
