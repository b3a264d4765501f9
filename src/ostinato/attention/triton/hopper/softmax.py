# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
"""The softmax of both kernels for Hopper, to base 2. In Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def capped(scores, scale, soft_cap):
    """The scores, capped, and the factor that makes them logits to base 2."""
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both infinities.
        doubled = gl.exp2(scores * (scale / soft_cap * 2.0 * LOG2_E))
        scores = (1.0 - 2.0 / (1.0 + doubled)) * (soft_cap * LOG2_E)
        factor = 1.0
    else:
        factor = scale * LOG2_E
    return scores, factor
