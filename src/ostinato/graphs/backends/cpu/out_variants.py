"""Finds the overload of an operator that writes into given tensors (``mm`` -> ``mm.out``)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ostinato.compat import OpOverload

# Factory arguments; an out-variant takes them from the tensor it writes into.
_FACTORY_ARGUMENTS = frozenset({"dtype", "layout", "device", "pin_memory"})


class OutVariant(NamedTuple):
    """The overload, the names of its outputs in order, and the keyword arguments to leave out."""

    operator: OpOverload
    output_names: tuple[str, ...]
    dropped: frozenset[str]


@cache
def out_variant_of(operator: OpOverload) -> OutVariant | None:
    """The out-variant that takes the same arguments, or None.

    Only torch's own operators qualify: their out-variants write where they are told, while nothing
    is known about the out-variant of a custom operator.
    """
    if operator.namespace != "aten" or operator._schema.is_mutable:
        return None
    if "batch_norm" in operator.name():
        return None  # updates its running statistics undeclared, so it must run only once
    if any(argument.name == "reduction" for argument in operator._schema.arguments):
        return None  # the out-variants of losses resize their outputs
    wanted = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    without_factory = [pair for pair in wanted if pair[0] not in _FACTORY_ARGUMENTS]
    for name in operator.overloadpacket.overloads():
        candidate = getattr(operator.overloadpacket, name)
        outputs = [argument for argument in candidate._schema.arguments if argument.is_out]
        if len(outputs) != len(operator._schema.returns) or not outputs:
            continue
        if any(str(argument.type) != "Tensor" for argument in outputs):  # lists of outputs
            continue
        taken = [
            (argument.name, str(argument.type))
            for argument in candidate._schema.arguments
            if not argument.is_out
        ]
        names = tuple(argument.name for argument in outputs)
        if taken == wanted:
            return OutVariant(candidate, names, frozenset())
        if taken == without_factory:
            return OutVariant(candidate, names, _FACTORY_ARGUMENTS)
    return None
