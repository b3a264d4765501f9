# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: disable-error-code="no-untyped-def,no-untyped-call"
"""How a kernel begins under programmatic dependent launch, if it does nothing ahead.

Kernels that load weights ahead call ``gdc_wait`` later, where they first read what others wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait for what the previous one writes."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
