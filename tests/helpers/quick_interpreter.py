"""Triton's interpreter without work that changes no result: a kernel takes half the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def quicken_interpreter() -> None:
    """Nested calls find the language patched; no overflow is computed that is never checked."""
    from triton.runtime import interpreter

    # Sums are computed again in 64 bits for an assertion that only ``debug`` makes.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang)


def _once_per_launch(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Every call of one kernel by another, such as ``tl.sum``, patches all of ``triton.language``.

    A launch patches it, and restores it at its end; calls inside the launch need no more than what
    it has not patched yet.
    """
    from triton import language as tl

    patched: set[str] = set()

    class Nothing:
        def restore(self) -> None:
            raise AssertionError("a launch inside a launch")

    def patch(function: Any) -> Any:
        values = list(map(id, function.__globals__.values()))
        langs = {lang.__name__ for lang in (tl, tl.core) if id(lang) in values}
        if patched and langs <= patched:
            return Nothing()
        scope = patch_lang(function)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        patched.update(langs)
        return scope

    return patch
