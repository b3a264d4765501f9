"""State that a callable reads, wherever it is stored: a change is found, or the result is right."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import logging
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ostinato import CaptureError, graphed
from ostinato.errors import OstinatoError

Function = Callable[[torch.Tensor], torch.Tensor]
Changing = tuple[Function, Callable[[], object]]  # a function, and what changes its result

log = logging.getLogger("tests.graphed_state")
factor = 2.0


class Settings:
    factor = 2.0
    table = {"factor": 2.0}

    @staticmethod
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    @classmethod
    def scaled_by_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float = 2.0


class Named(NamedTuple):
    factors: list[float]


class WithProperty(nn.Module):
    @property
    def gain(self) -> float:
        return factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@pytest.fixture
def settings_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A user's module whose name begins like a library's."""
    module = types.ModuleType("torch_settings")
    source = "factor = 2.0\ndef scaled(x):\n    return x * factor\n"
    exec(compile(source, "torch_settings.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "torch_settings", module)
    monkeypatch.setitem(globals(), "torch_settings", module)
    return module


def class_attribute(patch: pytest.MonkeyPatch) -> Changing:
    return lambda x: x * Settings.factor, lambda: patch.setattr(Settings, "factor", 3.0)


def class_method(patch: pytest.MonkeyPatch) -> Changing:
    return Settings.scaled_by_class, lambda: patch.setattr(Settings, "factor", 3.0)


def container_of_a_class(patch: pytest.MonkeyPatch) -> Changing:
    change = lambda: patch.setitem(Settings.table, "factor", 3.0)  # noqa: E731
    return lambda x: x * Settings.table["factor"], change


def global_of_a_static_method(patch: pytest.MonkeyPatch) -> Changing:
    return lambda x: Settings.scaled(x), lambda: patch.setitem(globals(), "factor", 3.0)


def global_of_a_property(patch: pytest.MonkeyPatch) -> Changing:
    return WithProperty(), lambda: patch.setitem(globals(), "factor", 3.0)


def slots(patch: pytest.MonkeyPatch) -> Changing:
    kept = Slotted()
    return lambda x: x * kept.factor, lambda: setattr(kept, "factor", 3.0)


def named_tuple(patch: pytest.MonkeyPatch) -> Changing:
    kept = Named([2.0])
    return lambda x: x * kept.factors[0], lambda: kept.factors.__setitem__(0, 3.0)


class AttributeDict(dict[str, float]):
    __getattr__ = dict.__getitem__


def attribute_dict(patch: pytest.MonkeyPatch) -> Changing:
    kept = AttributeDict(factor=2.0)
    return lambda x: x * kept.factor, lambda: kept.update(factor=3.0)


def a_deque(patch: pytest.MonkeyPatch) -> Changing:
    kept = collections.deque([2.0], maxlen=1)
    return lambda x: x * kept[0], lambda: kept.append(3.0)


def a_set(patch: pytest.MonkeyPatch) -> Changing:
    kept = {2}
    return lambda x: x * sum(kept), lambda: kept.add(3)


def items_of_a_set(patch: pytest.MonkeyPatch) -> Changing:
    kept = {2}
    return lambda x: x * sum(kept), lambda: (kept.clear(), kept.add(3))


def object_in_a_set(patch: pytest.MonkeyPatch) -> Changing:
    holder = types.SimpleNamespace
    kept = Slotted()
    both = frozenset({holder.__name__, types.MethodType(read_factor, kept)})
    return lambda x: x * max(each() for each in both if callable(each)), lambda: kept.__init__(3.0)


def read_factor(kept: Slotted) -> float:
    return kept.factor


def array_of_bytes(patch: pytest.MonkeyPatch) -> Changing:
    kept = bytearray(b"\2")
    return lambda x: x * kept[0], lambda: kept.__setitem__(0, 3)


def array_of_numbers(patch: pytest.MonkeyPatch) -> Changing:
    kept = array.array("d", [2.0])
    return lambda x: x * kept[0], lambda: kept.__setitem__(0, 3.0)


def mapping_proxy(patch: pytest.MonkeyPatch) -> Changing:
    kept = {"factor": 2.0}
    shown = types.MappingProxyType(kept)
    return lambda x: x * shown["factor"], lambda: kept.update(factor=3.0)


class Factor:
    value = 2.0


def weakly_referenced(patch: pytest.MonkeyPatch) -> Changing:
    kept = Factor()
    reference = weakref.ref(kept)
    return lambda x: x * reference().value, lambda: setattr(kept, "value", 3.0)  # type: ignore[union-attr]


CONTEXT_FACTOR: contextvars.ContextVar[float] = contextvars.ContextVar("factor")


def context_variable(patch: pytest.MonkeyPatch) -> Changing:
    CONTEXT_FACTOR.set(2.0)
    return lambda x: x * CONTEXT_FACTOR.get(), lambda: CONTEXT_FACTOR.set(3.0)


def function_attribute(patch: pytest.MonkeyPatch) -> Changing:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * function.factor  # type: ignore[attr-defined]

    function.factor = 2.0  # type: ignore[attr-defined]
    return function, lambda: setattr(function, "factor", 3.0)


def keyword_default(patch: pytest.MonkeyPatch) -> Changing:
    kept = {"factor": 2.0}

    def function(x: torch.Tensor, *, options: dict[str, float] = kept) -> torch.Tensor:
        return x * options["factor"]

    return function, lambda: kept.update(factor=3.0)


def zero_of_another_sign(patch: pytest.MonkeyPatch) -> Changing:
    kept = [0.0]
    function = lambda x: torch.copysign(x, torch.full_like(x, kept[0]))  # noqa: E731
    return function, lambda: kept.__setitem__(0, -0.0)


def variable_of_a_hook(patch: pytest.MonkeyPatch) -> Changing:
    model, kept = nn.Sequential(nn.Linear(3, 3)), [2.0]
    model[0].register_forward_hook(lambda module, args, result: result * kept[0])
    return model, lambda: kept.__setitem__(0, 3.0)


def another_hook(patch: pytest.MonkeyPatch) -> Changing:
    model = nn.Sequential(nn.Linear(3, 3))
    hook = model[0].register_forward_hook(lambda module, args, result: result * 2)

    def change() -> None:
        hook.remove()
        model[0].register_forward_hook(lambda module, args, result: result * 3)

    return model, change


def variable_of_a_patched_forward(patch: pytest.MonkeyPatch) -> Changing:
    model, kept = nn.Sequential(nn.Linear(3, 3)), [2.0]
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) * kept[0]
    return model, lambda: kept.__setitem__(0, 3.0)


class Instances(collections.OrderedDict[str, Any]):
    """Makes a new object on every read, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Doubles(list[float]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) * 2


def dict_that_makes_its_values(patch: pytest.MonkeyPatch) -> Changing:
    table = Instances(activation=nn.GELU)
    return lambda x: table["activation"](x), lambda: table.update(activation=nn.Tanh)


def list_that_makes_its_values(patch: pytest.MonkeyPatch) -> Changing:
    factors = Doubles([2.0])
    return lambda x: x * factors[0], lambda: factors.__setitem__(0, 3.0)


class Lists(nn.Module):
    """Runs whatever its containers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(3, 3)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(3, 3)})
        self.later = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.first, *self.by_name.values(), *self.later):
            x = module(x)
        for _, buffer in self.named_buffers(recurse=False):
            x = x + buffer
        return x


def linear_of(model: nn.Module) -> nn.Linear:
    return nn.Linear(3, 3, device=next(model.parameters()).device)


def module_added_to_a_sequence(patch: pytest.MonkeyPatch) -> Changing:
    model = nn.Sequential(nn.Linear(3, 3))
    return model, lambda: model.append(linear_of(model))


def module_added_to_a_list(patch: pytest.MonkeyPatch) -> Changing:
    model = Lists()
    return model, lambda: model.first.append(linear_of(model))


def module_added_to_an_empty_list(patch: pytest.MonkeyPatch) -> Changing:
    model = Lists()
    return model, lambda: model.later.append(linear_of(model))


def module_added_to_a_dict(patch: pytest.MonkeyPatch) -> Changing:
    model = Lists()
    return model, lambda: model.by_name.update({"b": linear_of(model)})


def buffer_added(patch: pytest.MonkeyPatch) -> Changing:
    model = Lists()
    model.register_buffer("one", torch.ones(3))
    return model, lambda: model.register_buffer("two", model.one + 1)


@pytest.mark.parametrize(
    "make",
    [
        *(module_added_to_a_sequence, module_added_to_a_list, module_added_to_an_empty_list),
        *(module_added_to_a_dict, buffer_added),
        *(dict_that_makes_its_values, list_that_makes_its_values),
        *(class_attribute, class_method, container_of_a_class, global_of_a_static_method),
        *(global_of_a_property, slots, named_tuple, a_deque, a_set, function_attribute),
        *(keyword_default, zero_of_another_sign, variable_of_a_hook, another_hook),
        *(variable_of_a_patched_forward, attribute_dict, items_of_a_set, object_in_a_set),
        *(array_of_bytes, array_of_numbers, mapping_proxy, weakly_referenced, context_variable),
    ],
    ids=lambda make: make.__name__,
)
def test_a_change_is_found(
    make: Callable[[pytest.MonkeyPatch], Changing],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    function, change = make(monkeypatch)
    if isinstance(function, nn.Module):
        function.to(device)
    check_change_is_found(function, change, device)


def check_change_is_found(
    function: Function, change: Callable[[], object], device: torch.device
) -> None:
    x = torch.rand(2, 3, device=device) + 1
    with graphed(function, sizes=[2, 4]) as fast, torch.no_grad():
        torch.testing.assert_close(fast(x), function(x))
        before = function(x)
        change()
        assert not torch.equal(function(x), before)
        with pytest.raises(OstinatoError, match=r"clear_graphs\(\)"):
            fast(x)
        fast.clear_graphs()
        torch.testing.assert_close(fast(x), function(x))


def test_a_table_that_makes_its_values_is_left_as_it_is(device: torch.device) -> None:
    table = Instances(activation=nn.GELU)
    x = torch.rand(2, 3, device=device)
    with graphed(lambda x: table["activation"](x), sizes=[2]) as fast:
        torch.testing.assert_close(fast(x), nn.GELU()(x))
    assert dict(table.items())["activation"] is nn.GELU


def test_a_change_that_was_found_is_found_until_it_is_undone(device: torch.device) -> None:
    """Attributes of torch's own modules are checked in turn: not all of them on every call."""
    norm = nn.LayerNorm(3, device=device)
    x = torch.rand(2, 3, device=device)
    with graphed(nn.Sequential(norm), sizes=[2]) as fast, torch.no_grad():
        for _ in range(8):  # until its graph is trusted
            before = fast(x).clone()
        norm.eps = 10.0
        results = [refusal_of(fast, x) for _ in range(40)]
        first = next(number for number, text in enumerate(results) if text)
        assert all("attribute '0.eps' is 10.0" in text for text in results[first:])
        norm.eps = 1e-5
        assert torch.equal(fast(x), before)
        assert not any(refusal_of(fast, x) for _ in range(40))


def refusal_of(function: Function, x: torch.Tensor) -> str:
    """The error of a call; empty if there is none."""
    try:
        function(x)
    except OstinatoError as error:
        return str(error)
    return ""


def test_globals_of_other_modules_are_watched(
    settings_module: types.ModuleType, device: torch.device
) -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        return x * torch_settings.factor  # type: ignore[name-defined]  # noqa: F821

    def called(x: torch.Tensor) -> torch.Tensor:
        return torch_settings.scaled(x)  # type: ignore[name-defined,no-any-return]  # noqa: F821

    for number, function in enumerate((read, called)):
        change = lambda number=number: setattr(settings_module, "factor", 3.0 + number)  # noqa: E731
        check_change_is_found(function, change, device)


def test_hooks_of_all_modules_are_watched(device: torch.device) -> None:
    register = nn.modules.module.register_module_forward_hook
    hooks: list[Any] = []
    try:
        check_change_is_found(
            nn.Sequential(nn.Linear(3, 3)).to(device),
            lambda: hooks.append(register(lambda module, args, result: result * 2)),
            device,
        )
    finally:
        for hook in hooks:
            hook.remove()


def test_modules_and_functions_that_are_arguments_are_watched(device: torch.device) -> None:
    model, kept = nn.Linear(3, 3).to(device), [2.0]
    x = torch.rand(2, 3, device=device)

    def apply(
        module: nn.Module, then: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        return then(module(x))

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * kept[0]

    with graphed(apply, sizes=[2]) as fast, torch.no_grad():
        torch.testing.assert_close(fast(model, scale, x), apply(model, scale, x))
        model.weight = nn.Parameter(torch.rand(3, 3, device=device))
        with pytest.raises(OstinatoError, match=r"parameter 'module.weight' moved"):
            fast(model, scale, x)
        fast.clear_graphs()
        torch.testing.assert_close(fast(model, scale, x), apply(model, scale, x))
        kept[0] = 3.0
        with pytest.raises(OstinatoError, match=r"kept\[0\] is 3.0"):
            fast(model, scale, x)


def test_a_change_before_a_run_is_not_taken_for_the_runs_own(device: torch.device) -> None:
    """The slope of torch's own module is looked at in turns; a run must not hide its change."""
    model = nn.Sequential(nn.LeakyReLU(0.1), *(nn.Identity() for _ in range(40)))
    with graphed(model, sizes=[4]) as fast:
        x = torch.rand(4, 3, device=device)
        fast(x)
        model[0].negative_slope = 0.5
        fast(x[:3])  # compared with an eager call; no number below 0 shows the slope
        fast(torch.rand(5, 3, device=device))  # larger: runs eagerly

        def several_calls() -> None:
            for _ in range(100):
                fast(-x)

        with pytest.raises(OstinatoError, match=r"attribute '0\.negative_slope' is 0\.5"):
            several_calls()


def test_what_a_hook_keeps_of_each_call_is_refused(device: torch.device) -> None:
    model, kept = nn.Sequential(nn.Linear(3, 3)).to(device), {}
    model[0].register_forward_hook(lambda module, args, result: kept.update(features=result))
    with (
        graphed(model, sizes=[2]) as fast,
        pytest.raises(CaptureError, match=r"kept\['features'\] is replaced inside the call"),
    ):
        fast(torch.rand(2, 3, device=device))


def test_a_logger_is_no_state(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        log.debug("%s", x.shape)
        return x * 2

    x = torch.rand(3, 2, device=device)
    with graphed(function, sizes=[4]) as fast:
        fast(x)
        level = log.level
        log.setLevel(logging.INFO)
        logging.getLogger("tests.graphed_state.other")
        try:
            assert torch.equal(fast(x), x * 2)
        finally:
            log.setLevel(level)


def test_what_an_object_caches_of_itself_is_no_state(device: torch.device) -> None:
    where = Path("some") / "directory"

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * len(where.parts)

    x = torch.rand(3, 2, device=device)
    with graphed(function, sizes=[4]) as fast:
        fast(x)
        assert str(where)
        assert where.parent.name
        assert hash(where)
        assert torch.equal(fast(x), x * 2)


def test_a_compiled_submodule(device: torch.device) -> None:
    model = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), nn.ReLU()).to(device)
    with graphed(model, sizes=[1, 4]) as fast, torch.no_grad():
        for rows in (3, 1, 4):
            x = torch.rand(rows, 3, device=device)
            torch.testing.assert_close(fast(x), model(x))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_module_is_refused_by_name(device: torch.device) -> None:
    model = nn.Sequential(torch.jit.script(Doubled()))
    x = torch.rand(2, 3, device=device)
    with (
        graphed(model, sizes=[2]) as fast,
        pytest.raises(CaptureError, match="module '0' is a TorchScript module"),
    ):
        fast(x)
    with graphed(model, sizes=[2], check_state_every=0) as fast:
        assert torch.equal(fast(x), x * 2)


# --- calls that do something for later ones -------------------------------------------------------


class Initialised(nn.Module):
    """Its first call sets its scale, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.is_set = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.scale.copy_(1 + x.abs().amax(0))
            self.is_set = True
        return x / self.scale


class Warm(nn.Module):
    """Its first call returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.is_warm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        was_warm, self.is_warm = self.is_warm, True
        return x if was_warm else x * 0


@pytest.fixture(params=[Initialised, Warm])
def special(request: pytest.FixtureRequest, device: torch.device) -> nn.Module:
    return request.param().to(device)  # type: ignore[no-any-return]


def test_a_special_first_call_is_refused_and_still_to_come(
    special: nn.Module, device: torch.device
) -> None:
    reference = type(special)().to(device)
    x = torch.rand(2, 3, device=device) + 1
    with graphed(special, sizes=[2]) as fast:
        with pytest.raises(CaptureError, match="call it once before graphed"):
            fast(x)
        assert torch.equal(special(x), reference(x))
        for _ in range(2):
            assert torch.equal(fast(x), reference(x))


# --- weights that torch computes ------------------------------------------------------------------


def test_cached_parametrizations_are_not_captured(device: torch.device) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)).to(device)
    x = torch.rand(2, 3, device=device)
    with graphed(model, sizes=[2]) as fast, torch.no_grad():
        with (
            nn.utils.parametrize.cached(),
            pytest.raises(CaptureError, match=r"inside torch\.nn\.utils\.parametrize\.cached\(\)"),
        ):
            fast(x)
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
            model.parametrizations.weight.original0.mul_(3)
        with nn.utils.parametrize.cached():
            torch.testing.assert_close(fast(x), model(x))
