"""Runs norms, gated MLPs and RoPE of transformers' modules in fused operators, in half precision.

A module is taken over only if it is the plain RMSNorm, SwiGLU or GeGLU, or RoPE by halves, that we
have an operator for. That is not read off its name: when a model is loaded, each runs on random
rows, and its result must equal the definition, written here in the operators that transformers
uses, bit for bit. Models in float32 keep transformers' modules, so that their results do not change
in any bit; so does code that torch.compile traces, which it fuses by itself.

A module changes its class for a subclass of it, so that whatever looks at its type, its attributes
and its parameters finds them as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from ostinato.ops.activation import Activation, activate
from ostinato.ops.gemm.linear import linear
from ostinato.ops.norm import rms_norm
from ostinato.ops.rotate_heads import rotate_heads

_HALVES = (torch.float16, torch.bfloat16)
_NUM_ROWS = 24
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu2")


@torch.no_grad()
def fuse_modules(model: nn.Module) -> int:
    """Take over the norms, MLPs and attention of ``model`` that can be; return their number.

    Weights of gate and up become views of one new tensor each. Synchronises.
    """
    taken = 0
    for module in list(model.modules()):
        parameters = [*module.parameters()]
        if not parameters or any(each.dtype not in _HALVES for each in parameters):
            continue
        if _take_norm(module) or _take_mlp(module) or _take_attention(module):
            taken += 1
    return taken


def update_fused_norms(model: nn.Module) -> None:
    """Follow changes of the weights of norms, in place. Other modules read the weights as such."""
    for module in model.modules():
        if isinstance(module, _FusedNorm):
            fused, _ = module._fused_norm
            fused.copy_(module._fused_weight(module.weight.detach()))


def _random_rows(like: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of very different sizes, the same ones for every module: they show a norm's eps."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(_NUM_ROWS, width, generator=generator)
    sizes = torch.logspace(-3, 1, _NUM_ROWS).unsqueeze(1)
    return (rows * sizes).to(like.device, like.dtype)


def _become(module: nn.Module, kind: type, **attributes: Any) -> None:
    """Give ``module`` the behaviour of ``kind`` on top of its own class."""
    own = type(module)
    fields = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    module.__class__ = type(own.__name__, (kind, own), fields)
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


# --- norms ----------------------------------------------------------------------------------------


class _FusedNorm(nn.Module):
    """RMSNorm in one kernel. ``_fused_norm``: weight and eps; ``_fused_weight``: makes the former
    from the module's."""

    weight: torch.Tensor
    _fused_norm: tuple[torch.Tensor, float]
    _fused_weight: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = not args and not kwargs and x.dtype is self.weight.dtype
        if not plain or torch.compiler.is_compiling():
            return cast(torch.Tensor, super().forward(x, *args, **kwargs))
        if x.dim() < 3 or x.shape[0] != 1:
            return rms_norm(x, *self._fused_norm)
        rows = x.squeeze(0)  # [T, hidden], [T, heads, head_dim] or [heads, T, head_dim]
        if rows.dim() == 3 and rows.stride(0) < rows.stride(1):
            # Tokens first: their number is not a constant of the kernel then.
            rows = rms_norm(rows.transpose(0, 1), *self._fused_norm).transpose(0, 1)
            return rows.unsqueeze(0)
        return rms_norm(rows, *self._fused_norm).unsqueeze(0)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


# What models do with the weight w of a norm, and the weight that does the same in ``rms_norm``: in
# the dtype of x it multiplies rounded values, in float32 it multiplies before they are rounded.
_Definition = tuple[
    Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    Callable[[torch.Tensor], torch.Tensor],
]
_NORMS: tuple[_Definition, ...] = (
    (lambda x, w, eps: w * _normed(x, eps).to(x.dtype), lambda w: w),
    (lambda x, w, eps: (w * _normed(x, eps)).to(x.dtype), lambda w: w.float()),
    (
        lambda x, w, eps: (_normed(x, eps) * (1.0 + w.float())).to(x.dtype),
        lambda w: 1.0 + w.float(),
    ),
)


def _take_norm(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if names != ["weight"] or next(module.buffers(), None) is not None:
        return False
    weight = cast(torch.Tensor, module.weight).detach()
    if type(eps) is not float or weight.dim() != 1 or next(module.children(), None) is not None:
        return False
    x = _random_rows(weight, weight.shape[0])
    exact = copy.deepcopy(module).float()
    for definition, fused_weight in _NORMS:
        if not _is(module, x, definition(x, weight, eps)):
            continue
        if _is(exact, x.float(), definition(x.float(), weight.float(), eps)):
            fused = fused_weight(weight), eps
            _become(module, _FusedNorm, _fused_norm=fused, _fused_weight=fused_weight)
            return True
    return False


def _is(module: nn.Module, x: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether ``module`` makes exactly this of ``x``; a module that takes more does not."""
    try:
        got = module(x)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return (
        isinstance(got, torch.Tensor) and got.dtype is expected.dtype and torch.equal(got, expected)
    )


# --- gated MLPs -----------------------------------------------------------------------------------


class _FusedMLP(nn.Module):
    """A gated MLP in two GEMMs. ``_gate_up``: the weights of gate and up, and their biases."""

    down_proj: nn.Linear
    _gate_up: tuple[torch.Tensor, torch.Tensor | None, Activation]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or torch.compiler.is_compiling():
            return cast(torch.Tensor, super().forward(x, *args, **kwargs))
        weight, bias, activation = self._gate_up
        rows = x.reshape(-1, x.shape[-1])
        rows = linear(rows, weight, bias, gated=True, activation=activation)
        rows = linear(rows, self.down_proj.weight, self.down_proj.bias)
        return rows.view(*x.shape[:-1], -1)


def _take_mlp(module: nn.Module) -> bool:
    parts = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    linears = [part for part in parts if type(part) is nn.Linear]
    if len(linears) != 3:
        return False
    gate, up, down = linears
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return False
    parameters = sum(each.numel() for part in linears for each in part.parameters())
    if parameters != sum(each.numel() for each in module.parameters()):
        return False  # it has more in it
    x = _random_rows(gate.weight, gate.in_features) / 8  # float16 overflows early
    for activation in _ACTIVATIONS:
        if _is(module, x, down(activate(gate(x), activation) * up(x))):
            joined = _joined(gate, up, "weight"), _joined(gate, up, "bias")
            _become(module, _FusedMLP, _gate_up=(*joined, activation))
            return True
    return False


def _joined(gate: nn.Linear, up: nn.Linear, name: str) -> Any:
    """Both tensors in one, of which the parameters become views; None if they have none."""
    parts: list[Any] = [getattr(gate, name), getattr(up, name)]
    if parts[0] is None:
        return None
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split(parts[0].shape[0]), strict=True):
        part.data = view
    return joined


# --- RoPE -----------------------------------------------------------------------------------------

_ROTARY = "apply_rotary_pos_emb"  # what modules of transformers call


class _FusedAttention(nn.Module):
    """Attention whose RoPE is one kernel. ``_fused_forward``: its code, which calls ours instead.

    Only this module calls it: transformers' function stays as it is for others.
    """

    _fused_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        return self._fused_forward(self, *args, **kwargs)


def _take_attention(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return False
    theirs = forward.__globals__.get(_ROTARY)
    if theirs is None or not _rotates_halves(theirs, next(module.parameters())):
        return False

    def ours(query: Any, key: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        fits = query.dim() == key.dim() == 4 and cos.shape == sin.shape == (1, *query.shape[2:])
        if not fits or args or kwargs or query.shape[0] != 1 or query.dtype is not key.dtype:
            return theirs(query, key, cos, sin, *args, **kwargs)
        states = (query.squeeze(0), key.squeeze(0), cos.squeeze(0), sin.squeeze(0))
        rotated_query, rotated_key = rotate_heads(*states)
        return rotated_query.unsqueeze(0), rotated_key.unsqueeze(0)

    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: ours},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    _become(module, _FusedAttention, _fused_forward=own)
    return True


def _rotates_halves(rotary: Any, like: torch.Tensor) -> bool:
    """Whether ``rotary`` is RoPE of pairs (i, i + D / 2): of all of a head, in this order."""
    rows = _random_rows(like, 7 * 8).float().view(1, _NUM_ROWS, 7, 8).transpose(1, 2)
    query, key = rows[:, :4], rows[:, 4:5]
    cos, sin = rows[:, 5], rows[:, 6]
    try:
        got = rotary(query, key, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False

    def rotated(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (heads * cos.unsqueeze(1)) + (turned * sin.unsqueeze(1))

    if not isinstance(got, tuple) or len(got) != 2:
        return False
    return torch.equal(got[0], rotated(query)) and torch.equal(got[1], rotated(key))
