"""A graphed ``nn.Module`` that behaves as the model in everything but calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from ostinato.graphs.capture.closing import Owner
from ostinato.graphs.graphed_callable import GraphedCallable

# Attributes looked up on the graphs. All others are looked up on the model.
_OF_GRAPHS = frozenset({"capture", "stats", "ledger", "unwrap", "clear_graphs", "close"})
# Attributes that Python looks up on the object itself.
_OWN = frozenset({"__class__", "__deepcopy__", "__reduce_ex__", "__enter__", "__exit__"})
# Methods that change the model as a whole and return it. An outer module applies changes to its
# children through the last one.
_CHANGES_MODEL = frozenset(
    {"eval", "train", "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "requires_grad_"}
    | {"_apply"}
)


class GraphedModule(Owner, torch.nn.Module):
    """Runs ``model`` through graphs; created by ``graphed()``, which documents the options.

    Attributes are read from and written to the model, as are its parameters, buffers and children:
    an outer module sees them under the same names as without graphs. Changing the model as a whole
    (``to()``, ``half()``, ``train()``, ...) drops the graphs, and the next call captures again.
    ``capture``, ``stats``, ``ledger``, ``clear_graphs``, ``unwrap`` and ``close`` work as on
    ``GraphedCallable``.
    """

    def __init__(self, graphs: GraphedCallable[..., Any]) -> None:
        # Skip nn.Module.__init__: it would give the model new, empty tables.
        object.__setattr__(self, "_graphs", graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "_graphs")(*args, **kwargs)

    def close(self) -> None:
        """Give back the graphs and their memory. The model itself stays usable."""
        _graphs_of(self).close()

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        graphs: GraphedCallable[..., Any] = object.__getattribute__(self, "_graphs")
        if name in _OF_GRAPHS:
            return getattr(graphs, name)
        value = getattr(graphs.unwrap(), name)
        return partial(_change, self, value) if name in _CHANGES_MODEL else value

    def __getattr__(self, name: str) -> NoReturn:
        # Reached only if the model has no such attribute.
        raise AttributeError(
            f"neither GraphedModule nor its {type(_model_of(self)).__name__} has an attribute "
            f"{name!r}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_model_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_model_of(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(_model_of(self)), *_OF_GRAPHS})

    def __repr__(self) -> str:
        return f"graphed({_model_of(self)!r})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _graphs_of(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _graphs_of(self).__reduce_ex__(protocol)


def _graphs_of(module: GraphedModule) -> GraphedCallable[..., Any]:
    graphs: GraphedCallable[..., Any] = object.__getattribute__(module, "_graphs")
    return graphs


def _model_of(module: GraphedModule) -> Callable[..., Any]:
    return _graphs_of(module).unwrap()


def _change(
    module: GraphedModule, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> GraphedModule:
    """Change the model as a whole, and drop its graphs, which hold the old state."""
    method(*args, **kwargs)
    _graphs_of(module).forget()
    return module
