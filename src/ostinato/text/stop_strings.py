"""Finds stop strings in a stream of text, character by character.

This is an Aho-Corasick automaton: each state stands for the longest suffix of the text that is a
prefix of a stop string. The cost per character does not depend on the number of strings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_CHARACTERS = 0x110000  # of Unicode


class StopStrings:
    """The states, numbered from 0, in which no part of a stop string has been seen."""

    def __init__(self, strings: Sequence[str]) -> None:
        # By state and character in one number, which takes a third of the memory of a dict each.
        self._next: dict[int, int] = {}
        self._found: dict[int, str] = {}
        self._depth = array("i", [0])
        for string in strings:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            key = state * _CHARACTERS + ord(character)
            following = self._next.get(key)
            if following is None:
                following = self._next[key] = len(self._depth)
                self._depth.append(self._depth[state] + 1)
            state = following
        self._found[state] = string

    def _link(self) -> None:
        """For each state, the state to continue from if the next character does not match."""
        self._shorter = array("i", [0] * len(self._depth))
        self._held_back = array("i", [0] * len(self._depth))
        # Shorter ones first: a link leads to what is shorter.
        edges = sorted(self._next.items(), key=lambda edge: self._depth[edge[1]])
        for key, state in edges:
            parent, character = divmod(key, _CHARACTERS)
            if parent:
                self._shorter[state] = self.step(self._shorter[parent], character)
            shorter = self._shorter[state]
            if state not in self._found and shorter in self._found:
                self._found[state] = self._found[shorter]
        begun = {key // _CHARACTERS for key in self._next}  # a longer string goes on from there
        for _, state in edges:
            shorter = self._held_back[self._shorter[state]]
            self._held_back[state] = self._depth[state] if state in begun else shorter

    def step(self, state: int, character: int) -> int:
        """The state after one more character."""
        following, shorter = self._next, self._shorter
        while True:
            found = following.get(state * _CHARACTERS + character)
            if found is not None:
                return found
            if state == 0:
                return 0
            state = shorter[state]

    def found(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._found.get(state)

    def num_held_back(self, state: int) -> int:
        """The number of characters at the end of the text that may begin a stop string."""
        return self._held_back[state]


@lru_cache(maxsize=8)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings: requests mostly come with the same ones."""
    return StopStrings(strings)
