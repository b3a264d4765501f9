"""How models write tool calls, as their chat templates say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.structured.params import StructuredOutputsParams

# As models were trained to write it; free to choose, some write nothing but spaces.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """A call is a JSON object with the name and, as ``arguments_key``, the arguments.

    ``opening`` and ``closing`` are around each; if they are empty, the answer is nothing but calls,
    with ``;`` in between.
    """

    name: str
    arguments_key: str
    opening: str = ""
    closing: str = ""

    def structure(
        self, tools: Sequence[dict[str, Any]], tokenizer: Any, *, several: bool
    ) -> StructuredOutputsParams:
        """The structure of an answer that calls one of ``tools``, or ``several`` in turn."""
        each = [self._schema(number, tool) for number, tool in enumerate(tools)]
        schema = {"x-guidance": _SPACING, "anyOf": each}
        if not self.opening:
            return StructuredOutputsParams(json=schema)
        # Not "::=", by which GBNF is told from Lark.
        text = json.dumps(schema).replace("::=", ":\\u003a=")
        opening, closing = (_written(mark, tokenizer) for mark in (self.opening, self.closing))
        call = f'{opening} "\\n" body "\\n" {closing}'
        more = ' ("\\n" call)*' if several else ""
        return StructuredOutputsParams(
            grammar=f"start: call{more}\ncall: {call}\nbody: %json {text}"
        )

    def _schema(self, number: int, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        arguments = function.get("parameters") or {"type": "object"}
        place = f"#/anyOf/{number}/properties/{self.arguments_key}"
        return {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                self.arguments_key: _moved(arguments, place),
            },
            "required": ["name", self.arguments_key],
            "additionalProperties": False,
        }


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of another one, where its references begin at ``place``."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _written(mark: str, tokenizer: Any) -> str:
    """A mark in a grammar: the token that the model knows it as, or its text.

    A special token would not be in the text.
    """
    token = tokenizer.get_added_vocab().get(mark)
    if token is None or token in tokenizer.all_special_ids:
        return json.dumps(mark)
    return f"<[{token}]>"


HERMES = CallFormat(
    name="hermes", arguments_key="arguments", opening="<tool_call>", closing="</tool_call>"
)
LLAMA = CallFormat(name="llama3_json", arguments_key="parameters")

# In Llama's templates, from 3.1 on.
_LLAMA = re.compile(r'\{"name": function name, "parameters": dictionary of argument name')
# Others also write <tool_call>, with something else than JSON inside.
_NOT_JSON = ("<function=", "<arg_key>", "<parameter=")


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template states; None: none that is known here."""
    if HERMES.opening in template and not any(each in template for each in _NOT_JSON):
        return HERMES
    if _LLAMA.search(template):
        return LLAMA
    return None
