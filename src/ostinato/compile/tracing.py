"""Traces a model once with Dynamo: its graph, with a symbol for the number of tokens.

Dynamo never runs the traced function, and its guards are not kept. Guards on the number of tokens
end up in ``serves``; everything else that the model read during tracing (attributes, flags, the
shapes of its weights) is fixed from then on, as in any graph.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ostinato import compat
from ostinato.errors import CaptureError
from ostinato.graphs.tree import map_tensors

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Argument:
    """Stands for the argument with this index."""

    index: int


@dataclass(kw_only=True, eq=False)
class Trace:
    """``inputs`` has, per placeholder of ``graph``, an ``Argument`` or a constant tensor.

    It is None for the placeholders of symbols.
    """

    graph: fx.GraphModule
    inputs: list[torch.Tensor | Argument | None]
    fixed_size: int | None
    # What the function returns, with placeholder tensors for the graph's outputs and for the
    # arguments; and the index of each placeholder.
    _result: Any
    _outputs: dict[torch.Tensor, int]
    _arguments: dict[torch.Tensor, int]
    _conditions: Conditions

    def result(self, outputs: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> Any:
        """What the function returns for ``args``, given the graph's outputs."""

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if tensor in self._outputs:
                return outputs[self._outputs[tensor]]
            return args[self._arguments[tensor]] if tensor in self._arguments else tensor

        return map_tensors(place, self._result)

    def serves(self, num_tokens: int) -> bool:
        """Whether the graph is valid for this number of tokens."""
        if self.fixed_size is not None:
            return num_tokens == self.fixed_size
        return self._conditions.hold(num_tokens)

    def __str__(self) -> str:
        if self.fixed_size is not None:
            return f"a trace for {self.fixed_size} tokens"
        return f"a trace for any number of tokens with {self._conditions}"


class Conditions:
    """Conditions so far on the symbols of a trace, all of which are the number of tokens."""

    def __init__(self, shape_env: Any) -> None:
        self._ranges = dict(shape_env.var_to_range)
        self._guards = [guard.expr for guard in shape_env.guards]

    def hold(self, num_tokens: int) -> bool:
        sizes = dict.fromkeys(self._ranges, num_tokens)
        in_range = all(
            bounds.lower <= num_tokens <= bounds.upper for bounds in self._ranges.values()
        )
        return in_range and all(bool(guard.subs(sizes)) for guard in self._guards)

    def __str__(self) -> str:
        return " and ".join(map(str, self._guards)) or "no conditions"


def any_size() -> AbstractContextManager[None]:
    """Trace and compile without special cases for sizes 0 and 1, so that one graph serves all."""
    config = compat.symbolic_shape_settings.demand()
    patch: AbstractContextManager[None] = config.patch(backed_size_oblivious=True)
    return patch


def trace(
    function: Callable[..., Any], args: Sequence[torch.Tensor], *, size: int, fixed: bool = False
) -> Trace:
    """Trace ``function`` with the first dimension of all ``args`` symbolic, ``size`` as example.

    With ``fixed`` the graph is for exactly that size.

    Neither ``args`` nor the function are run. The function must trace as one graph: otherwise it
    raises ``CaptureError`` with the user's line.
    """
    dynamo = compat.dynamo.demand()  # importing it takes two seconds, so only when compiling

    seen: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

    outputs: list[torch.Tensor] = []

    def collect(graph: fx.GraphModule, _: list[Any]) -> Callable[..., list[torch.Tensor]]:
        returned: Any = _output_node(graph).args[0]

        def run(*inputs: Any) -> list[torch.Tensor]:
            seen.append((graph, inputs))
            outputs[:] = (torch.empty(0) for _ in returned)
            return outputs

        return run

    with torch.inference_mode(False), torch.no_grad():
        examples = [
            torch.zeros((size, *arg.shape[1:]), dtype=arg.dtype, device=arg.device) for arg in args
        ]
        for example in () if fixed else examples:
            dynamo.mark_dynamic(example, 0)
        with any_size():
            traced = torch.compile(
                _with_own_code(function), backend=collect, fullgraph=True, dynamic=False
            )
            try:
                result = traced(*examples)
            except dynamo.exc.TorchDynamoException as error:
                raise _trace_error(function, error) from error
    if len(seen) != 1:
        raise CaptureError(
            f"torch.compile traced {len(seen)} graphs of {name_of(function)}, not one; it is "
            "disabled (TORCHDYNAMO_DISABLE, torch.compiler.set_stance), or the model runs no "
            "operator"
        )
    graph, inputs = seen.pop()  # Dynamo keeps its backends, which must not keep the weights
    arguments = {example: index for index, example in enumerate(examples)}
    return Trace(
        graph=graph,
        inputs=_bind(graph, inputs, arguments),
        fixed_size=size if fixed else None,
        _result=result,
        _outputs={output: index for index, output in enumerate(outputs)},
        _arguments=arguments,
        _conditions=Conditions(_shape_env(graph)),
    )


def _bind(
    graph: fx.GraphModule, inputs: tuple[Any, ...], arguments: dict[torch.Tensor, int]
) -> list[torch.Tensor | Argument | None]:
    bound: list[torch.Tensor | Argument | None] = []
    for name, value in zip(_placeholders(graph), inputs, strict=True):
        if isinstance(value, torch.Tensor):
            bound.append(Argument(arguments[value]) if value in arguments else value)
        elif isinstance(value, int):
            bound.append(None)
        else:
            raise CaptureError(
                f"the traced model takes a {type(value).__name__} ({name}) from outside; only "
                "tensors and the number of tokens can be inputs"
            )
    return bound


def _shape_env(graph: fx.GraphModule) -> Any:
    values = [node.meta["example_value"] for node in _placeholders(graph)]
    fake: Any = next(value for value in values if isinstance(value, torch.Tensor))
    return fake.fake_mode.shape_env


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a new code object: Dynamo keeps, and limits, traces per code object."""

    def call(*args: torch.Tensor) -> Any:
        return function(*args)

    return types.FunctionType(
        call.__code__.replace(co_name="traced_model"), call.__globals__, closure=call.__closure__
    )


def _trace_error(function: Callable[..., Any], error: Exception) -> CaptureError:
    source = _user_line(error)
    reason = str(error).split("\n", 1)[0].rstrip(". ")
    return CaptureError(
        f"{name_of(function)} cannot be traced as one graph, at {source or 'an unknown line'}: "
        f"{reason}. Rewrite that line with torch operators, move it into an operator named in "
        "splitting_ops, or capture without compiling",
        source=source,
    )


def _user_line(error: Exception) -> str | None:
    """The innermost line that Dynamo was tracing that is neither torch's nor this package's."""
    for frame in reversed(getattr(error, "real_stack", None) or []):
        if not frame.filename.startswith((_TORCH, _HERE, "<")):
            line = f": `{frame.line}`" if frame.line else ""
            return f"{frame.filename}:{frame.lineno} in {frame.name}{line}"
    return None


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _output_node(graph: fx.GraphModule) -> fx.Node:
    node: fx.Node = next(iter(graph.graph.find_nodes(op="output")))
    return node
