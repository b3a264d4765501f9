"""Splits a traced graph at operators, into pieces and a model that calls them in order.

Pieces take only tensors that change from batch to batch: weights are bound, and the number of
tokens is read from a tensor's shape. So a piece's graph has little to check on replay.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from ostinato.compat import OpOverload, OpOverloadPacket
from ostinato.compile.operators import function_of
from ostinato.compile.tracing import Argument, Trace


@dataclass(kw_only=True, eq=False)
class Piece:
    """``bound`` are the inputs of ``module`` that are always the same tensors, by position."""

    name: str
    module: fx.GraphModule
    bound: dict[int, torch.Tensor]
    is_splitting: bool

    @property
    def operators(self) -> list[str]:
        """Names of the operators it runs, in order."""
        nodes = self.module.graph.nodes
        return [str(node.name) for node in nodes if node.op not in ("placeholder", "output")]

    @property
    def example_inputs(self) -> list[Any]:
        """Inputs of the whole module, including bound ones: fake tensors with symbolic shapes."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return [node.meta["example_value"] for node in placeholders]


@dataclass(kw_only=True, eq=False)
class SplitModel:
    """``caller`` takes the model's arguments and calls the pieces, which are its attributes.

    ``arguments`` are the indices of the arguments that it takes, in order.
    """

    caller: fx.GraphModule
    pieces: list[Piece]
    arguments: list[int]
    missing_ops: list[str]


def split(trace: Trace, splitting_ops: Sequence[str]) -> SplitModel:
    """Split at every call of an operator named in ``splitting_ops`` ("namespace::name").

    A function that is not an operator goes by its qualified name ("torch.softmax").
    """
    partition, splitting, found = _partition(trace.graph, set(splitting_ops))
    caller = split_module(
        trace.graph,
        trace.graph,
        lambda node: partition[node],
        keep_original_order=True,
    )
    inputs = dict(zip(caller.graph.find_nodes(op="placeholder"), trace.inputs, strict=True))
    calls = caller.graph.find_nodes(op="call_module", sort=True)
    pieces = []
    for call in calls:
        module = getattr(caller, call.target)
        number = int(call.target.rsplit("_", 1)[1])
        _read_sizes_off_tensors(call, module)
        bound = _bind_weights(call, inputs)
        if number in splitting:
            _call_functions(module)
        pieces.append(
            Piece(
                name=call.target,
                module=module,
                bound=bound,
                is_splitting=number in splitting,
            )
        )
    arguments = _drop_unused_inputs(caller, inputs)
    caller.graph.lint()
    caller.recompile()
    missing = [name for name in splitting_ops if name not in found]
    return SplitModel(caller=caller, pieces=pieces, arguments=arguments, missing_ops=missing)


def _partition(
    graph: fx.GraphModule, names: set[str]
) -> tuple[dict[fx.Node, int], set[int], set[str]]:
    """The piece number of every node, the numbers of splitting pieces, and the names found."""
    partition: dict[fx.Node, int] = {}
    splitting: set[int] = set()
    found: set[str] = set()
    number = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and isinstance(
            node.args[0].meta.get("example_value"), (tuple, list)
        ):
            # Keep getitem with its operator, so that only tensors pass between pieces.
            partition[node] = partition[node.args[0]]
            continue
        matched = names & _names_of(node)
        if matched:
            found |= matched
            number += 1
            splitting.add(number)
        partition[node] = number
        if matched:
            number += 1
    return partition, splitting, found


def _names_of(node: fx.Node) -> set[str]:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return {target.name().split(".")[0], target.name()}
    if isinstance(target, OpOverloadPacket):
        return {target._qualified_op_name}
    if node.op != "call_function":
        return set()
    return {f"{getattr(target, '__module__', None) or 'torch'}.{target.__name__}"}


def _read_sizes_off_tensors(call: fx.Node, module: fx.GraphModule) -> None:
    """Replace integer inputs of a piece that equal the length of one of its tensor inputs."""
    placeholders = module.graph.find_nodes(op="placeholder", sort=True)
    lengths: dict[Any, tuple[fx.Node, int]] = {}
    for node in placeholders:
        value = node.meta.get("example_value")
        shape: Any = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, length in enumerate(shape):
            if isinstance(length, torch.SymInt):
                lengths.setdefault(length.node.expr, (node, dim))
    first = next((node for node in module.graph.nodes if node.op != "placeholder"), None)
    kept = list(call.args)
    for node, passed in zip(placeholders, call.args, strict=True):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymInt) or value.node.expr not in lengths:
            continue
        with module.graph.inserting_before(first):
            size = module.graph.call_method("size", lengths[value.node.expr])
        size.meta["example_value"] = value
        node.replace_all_uses_with(size)
        module.graph.erase_node(node)
        kept.remove(passed)
    call.args = tuple(kept)
    module.recompile()


def _bind_weights(call: fx.Node, inputs: dict[fx.Node, Any]) -> dict[int, torch.Tensor]:
    """Remove the inputs that are always the same tensor from the call."""
    values = [inputs.get(arg) if isinstance(arg, fx.Node) else None for arg in call.args]
    bound = {
        position: value for position, value in enumerate(values) if isinstance(value, torch.Tensor)
    }
    call.args = tuple(arg for position, arg in enumerate(call.args) if position not in bound)
    return bound


def _call_functions(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = function_of(node.target)
    module.recompile()


def _drop_unused_inputs(caller: fx.GraphModule, inputs: dict[fx.Node, Any]) -> list[int]:
    arguments = [node for node, value in inputs.items() if isinstance(value, Argument)]
    first = next(node for node in caller.graph.nodes if node.op != "placeholder")
    for node, value in inputs.items():
        if isinstance(value, Argument):
            continue
        if node.users:  # the number of tokens, for a piece without a tensor to read it from
            with caller.graph.inserting_before(first):
                replacement = (
                    caller.graph.call_method("size", (arguments[0], 0))
                    if value is None
                    else _constant(caller, node.name, value)
                )
            node.replace_all_uses_with(replacement)
        caller.graph.erase_node(node)
    return [inputs[node].index for node in arguments]


def _constant(caller: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    """A constant tensor that the model returns."""
    caller.register_buffer(name, value, persistent=False)
    return caller.graph.get_attr(name)
