"""torch's own Python functions for its operators: the same calls, with less on the way.

An operator taken from ``torch.ops`` works out from its schema, on every call, what it was given.
The function that torch generates for Python (``torch.mm`` for ``mm.out``) knows its arguments. That
is a microsecond or two per call, and more when a model's weights have just passed through the
caches: 2 of the 35 ms that a step of SmolLM2-135M takes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ostinato.compat import OpOverload, generated_functions

Call = Callable[..., object]


@cache
def out_calls(operator: OpOverload) -> tuple[Call, ...]:
    """Ways to call an out-variant with its arguments, the fastest first, the operator itself last.

    Whether a function takes the operator's arguments, and does the same, is for the caller to see.
    """
    name = operator.overloadpacket.__name__
    functions = (getattr(module, name, None) for module in generated_functions)
    return (*(function for function in functions if function is not None), operator)
