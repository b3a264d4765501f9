"""``Grammars``: compiles what requests ask for, with llguidance, for one tokenizer."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.errors import RequestError
from ostinato.quoting import is_failure, said, shown
from ostinato.structured.constraint import Constraint, Mask
from ostinato.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MOST_KEPT = 64
# Rules may refer to each other in a chain as long as the text allows, and llguidance follows it on
# the stack, about 20 KiB for each. Only memory that is used is taken.
_STACK_BYTES = 512 * 2**20
_starting = threading.Lock()  # the size of new stacks is one for the process


class Grammars:
    """The grammars of one model; any thread may use it. Reads the tokenizer when first needed.

    ``unsupported_reason``: why this engine cannot constrain its output, if it cannot.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        unsupported_reason: str | None = None,
    ) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._unsupported_reason = unsupported_reason
        self.are_used = False  # whether there was a constraint
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._ends = _bits(self._eos_token_ids, vocab_size)
        self._compiled: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of the compiled ones, for a moment
        self._compiling = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> None:
        """Compile, unless that was done before: what may take long. Raises RequestError."""
        self._matcher(params)

    def constraint(self, params: StructuredOutputsParams, *, ignore_eos: bool) -> Constraint:
        """The constraint of one new sequence."""
        self.are_used = True
        allows_end = bool(self._eos_token_ids) and not ignore_eos
        matcher = self._matcher(params).deep_copy()
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        tokenizer, ends = self._the_tokenizer(), self._ends
        return Constraint(matcher, tokenizer, self._executor, ends, allows_end=allows_end)

    def _matcher(self, params: StructuredOutputsParams) -> LLMatcher:
        matcher = self._known(params)
        if matcher is None:
            with self._compiling:
                matcher = self._known(params) or _on_a_large_stack(lambda: self._compile(params))
            with self._lock:
                self._compiled[params] = matcher
                if len(self._compiled) > _MOST_KEPT:
                    self._compiled.popitem(last=False)
        return matcher

    def _known(self, params: StructuredOutputsParams) -> LLMatcher | None:
        with self._lock:
            if params in self._compiled:
                self._compiled.move_to_end(params)
            return self._compiled.get(params)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        tokenizer = self._the_tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar(params)
        except ValueError as error:
            raise _refused(params, said(error)) from None
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first takes longest: the lexer is built for it
        if matcher.is_error():
            raise _refused(params, said(matcher.get_error()))
        return matcher

    def _the_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if self._unsupported_reason is not None:
                raise RequestError(f"structured_outputs: {self._unsupported_reason}")
            if importlib.util.find_spec("llguidance") is None:
                raise RequestError(
                    "structured_outputs needs llguidance, which is not installed; install it with "
                    "`pip install 'ostinato[structured]'`"
                )
            if not getattr(self._hf_tokenizer, "is_fast", False):
                raise RequestError(
                    "structured_outputs needs a tokenizer of the tokenizers library, and this "
                    f"model has {'a slow one' if self._hf_tokenizer else 'none'}"
                )
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        # Without an end of its own, the model gets some token that the masks leave out again.
        ends = self._eos_token_ids or [self._vocab_size - 1]
        try:
            return from_tokenizer(self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=ends)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RequestError(
                f"structured_outputs: llguidance cannot read this model's tokenizer: {said(error)}"
            ) from error


def _grammar(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's form. ValueError: it is none."""
    from llguidance import LLMatcher, grammar_from

    if params.schema is not None:
        whitespace: JsonCompileOptions = {}
        if params.disable_any_whitespace:
            whitespace["whitespace_flexible"] = False
        if params.whitespace_pattern is not None:
            whitespace["whitespace_pattern"] = params.whitespace_pattern
        return LLMatcher.grammar_from_json_schema(params.schema, overrides=whitespace)
    if params.choice is not None:
        # One terminal, which the lexer reads: a rule may have only 2,000 alternatives.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        return grammar_from("grammar", f"start: CHOICE\nCHOICE: {texts}")
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    assert params.grammar is not None
    return grammar_from("grammar", params.grammar)


def _refused(params: StructuredOutputsParams, why: str) -> RequestError:
    kind = params.kind
    return RequestError(
        f"structured_outputs: this {kind} cannot be used: {why} ({kind} is "
        f"{shown(getattr(params, kind))})"
    )


def _bits(token_ids: list[int], vocab_size: int) -> Mask:
    flags = np.zeros(mask_width(vocab_size) * 32, dtype=np.uint8)
    flags[token_ids] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def mask_width(vocab_size: int) -> int:
    """The words of a mask over this many tokens."""
    return -(-vocab_size // 32)


def _on_a_large_stack(function: Callable[[], LLMatcher]) -> LLMatcher:
    results: list[LLMatcher] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ostinato-grammar")
    with _starting:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise RequestError(
                f"structured_outputs: the thread that compiles grammars cannot start ({error}); "
                f"its stack needs {_STACK_BYTES // 2**20} MiB of address space: raise ulimit -v, "
                "or the limit of threads (ulimit -u)"
            ) from error
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
