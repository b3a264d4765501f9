"""torch's generated Python functions for operators: the same calls with less overhead.

An operator from ``torch.ops`` parses its arguments against its schema on every call. The function
that torch generates for Python (``torch.mm`` for ``mm.out``) knows its arguments. That saves one or
two microseconds per call, and more when a model's weights have just flushed the caches: 2 of the
35 ms of a SmolLM2-135M step on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from ostinato.compat import OpOverload, generated_functions

Call = Callable[..., object]


@cache
def out_calls(operator: OpOverload) -> tuple[Call, ...]:
    """Ways to call an out-variant with its arguments, fastest first, the operator itself last.

    The caller must verify that a function accepts the arguments and computes the same result.
    """
    name = operator.overloadpacket.__name__
    functions = (getattr(module, name, None) for module in generated_functions)
    return (*(function for function in functions if function is not None), operator)
