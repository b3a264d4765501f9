"""Declares user options once, with their help, and rejects unknown names helpfully.

A dataclass of options declares each with ``option(default, help)``. ``user_options`` makes its
constructor handle other names: another engine's name for the same option is accepted, one that
means something else gets an error that says what to write here, and any other name gets the nearest
match. The help becomes the class's docstring and the options of the command line.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from textwrap import fill
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from ostinato.errors import ConfigError
from ostinato.quoting import shown

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


def option(default: Any, help: str, *, cli: type | None = None) -> Any:
    """A field of an options dataclass. ``cli``: its type on the command line, if it is offered."""
    return field(default=default, metadata={"help": help, "cli": cli})


def check_flags(options: Any) -> None:
    """Raise unless options that are on or off are: any text, "false" too, would count as on."""
    for each in fields(options):
        value = getattr(options, each.name)
        if each.type == "bool | None" and value is None:
            continue
        if each.type in ("bool", "bool | None") and not isinstance(value, bool):
            raise ConfigError(f"{each.name} must be True or False, got {shown(value)}")


def check_seed(seed: object) -> None:
    """Raise for what is no seed of a random generator."""
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be an integer in [0, 2**63), got {shown(seed)}")


class Foreign(NamedTuple):
    """An option of another engine that does not exist here.

    ``harmless``: values that ask for the behavior here; they are accepted.
    """

    instead: str
    harmless: tuple[Any, ...] = ()


def user_options(
    *,
    example: str,
    name: str | None = None,
    aliases: Mapping[str, str] | None = None,
    foreign: Mapping[str, Foreign] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Class decorator for a dataclass: check the option names passed to its constructor.

    ``aliases``: other names of its fields. Errors refer to ``name``, which is what users call, and
    show the option ``example``.
    """

    def decorate(cls: type[T]) -> type[T]:
        called = name or cls.__name__
        own = [each for each in fields(cls) if each.init]  # type: ignore[arg-type]
        positional = [each.name for each in own if not each.kw_only]
        names = frozenset(each.name for each in own)
        plain = cls.__init__

        @functools.wraps(plain)
        def checked(self: T, *args: Any, **options: Any) -> None:
            if len(args) > len(positional):
                raise ConfigError(
                    f"{called} takes its options by name, but {shown(args[len(positional)])} was "
                    f"given without one; write for example {called}({example}=...)"
                )
            if not options.keys() <= names:
                options = _known(called, names, options, aliases or {}, foreign or {})
            plain(self, *args, **options)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{described(own)}"
        return cls

    return decorate


def user_call(
    foreign: Mapping[str, Foreign], *, called: str | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for a function or method: check the names of its keywords as those of options.

    Errors refer to ``called``, or to the qualified name if None.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        name = called or function.__qualname__
        names = frozenset(inspect.signature(function).parameters)

        def known(options: dict[str, Any]) -> Any:
            return options if options.keys() <= names else _known(name, names, options, {}, foreign)

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> T:
            return function(*args, **known(options))

        @functools.wraps(function)
        async def awaited(*args: Any, **options: Any) -> Any:
            return await cast(Any, function)(*args, **known(options))

        return cast(Any, awaited) if inspect.iscoroutinefunction(function) else checked

    return decorate


def _known(
    name: str,
    names: frozenset[str],
    options: Mapping[str, Any],
    aliases: Mapping[str, str],
    foreign: Mapping[str, Foreign],
) -> dict[str, Any]:
    """Translate option names to the names used here."""
    known: dict[str, Any] = {}
    for given, value in options.items():
        own = aliases.get(given, given)
        if own in names:
            if own in known or (own != given and own in options):
                raise ConfigError(f"{name} was given both {own} and {given}, which are the same")
            known[own] = value
        elif given in foreign:
            if not _is_one_of(value, foreign[given].harmless):
                raise ConfigError(
                    f"{name} has no option {given} (got {shown(value)}): {foreign[given].instead}"
                )
        else:
            nearest = difflib.get_close_matches(given, [*names, *aliases], n=1, cutoff=0.7)
            hint = f"did you mean {nearest[0]}?" if nearest else "help() lists its options"
            raise ConfigError(f"{name} has no option {shown(given)}; {hint}")
    return known


def _is_one_of(value: Any, plain: tuple[Any, ...]) -> bool:
    # Arrays and their like compare element by element; none of them is a plain value.
    return isinstance(value, str | int | float | None) and value in plain


def described(options: list[Field[Any]]) -> str:
    """The options with their defaults and help, for a docstring."""
    return "Options:\n" + "\n".join(
        fill(
            f"{each.name}: {each.metadata['help']} (default: {each.default!r})",
            width=96,
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
        for each in options
        if each.metadata.get("help")
    )


def same_options_as(
    config: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """For an ``__init__`` that builds a ``config``: give it the config's signature."""

    def decorate(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        options = inspect.signature(config).parameters.values()
        init.__signature__ = inspect.Signature([itself, *options])  # type: ignore[attr-defined]
        return init

    return decorate
