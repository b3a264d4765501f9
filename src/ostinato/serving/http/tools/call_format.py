"""How models write tool calls, as their chat templates say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.structured.params import StructuredOutputsParams


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
        self, tools: Sequence[dict[str, Any]], *, several: bool
    ) -> StructuredOutputsParams:
        """The structure of an answer that calls one of ``tools``, or ``several`` in turn."""
        schema = {"anyOf": [self._schema(tool) for tool in tools]}
        if not self.opening:
            return StructuredOutputsParams(json=schema)
        # Not "::=", by which GBNF is told from Lark.
        text = json.dumps(schema).replace("::=", ":\\u003a=")
        call = f'{json.dumps(self.opening)} "\\n" body "\\n" {json.dumps(self.closing)}'
        more = ' ("\\n" call)*' if several else ""
        return StructuredOutputsParams(
            grammar=f"start: call{more}\ncall: {call}\nbody: %json {text}"
        )

    def _schema(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        return {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                self.arguments_key: function.get("parameters") or {"type": "object"},
            },
            "required": ["name", self.arguments_key],
            "additionalProperties": False,
        }


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
