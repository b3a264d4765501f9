"""Messages between ranks through the store: heartbeats, errors, findings and goodbyes.

This module measures no time and does not interpret a beat; it only tells that it changed.
"""

from __future__ import annotations

from typing import Protocol

from ostinato.errors import RankFailedError

GOODBYE = "left"
_FINDING = "found "


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that the watchdog uses."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Beats:
    """The beats of all ranks, as ``rank`` sees them. Raises and blocks as the store does."""

    def __init__(self, rank: int, store: Store) -> None:
        self._rank = rank
        self._store = store

    def beat(self, beat: str) -> None:
        """Replace this rank's beat."""
        self._store.set(_beat_key(self._rank), beat)

    def say_goodbye(self) -> None:
        """Write this rank's last beat when it leaves on purpose."""
        self.beat(GOODBYE)

    def tell_finding(self, failure: RankFailedError) -> None:
        """Write this rank's last beat when it leaves because another rank failed."""
        rank = "" if failure.rank is None else str(failure.rank)
        self.beat(f"{_FINDING}{rank}:{failure}")

    def tell_error(self, message: str) -> None:
        """Report that this rank failed."""
        self._store.set(_error_key(self._rank), message)

    def of(self, rank: int) -> str:
        """The last beat of ``rank``; empty before its first. Raises a failure that it reported."""
        # In this order: a rank that leaves because of an error reports the error first.
        beat = self._read(_beat_key(rank))
        error = self._read(_error_key(rank))
        if error:
            raise RankFailedError(f"rank {rank} failed: {error}", rank)
        if beat.startswith(_FINDING):
            found, _, message = beat.removeprefix(_FINDING).partition(":")
            raise RankFailedError(message, int(found) if found else None)
        return beat

    def _read(self, key: str) -> str:
        # get() would block on a key that does not exist yet.
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _beat_key(rank: int) -> str:
    return f"ostinato/watchdog/beat/{rank}"


def _error_key(rank: int) -> str:
    return f"ostinato/watchdog/error/{rank}"
