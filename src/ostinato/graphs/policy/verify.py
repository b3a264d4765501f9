"""``verify=``: which graphs and steps are compared with eager runs."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import ConfigError
from ostinato.quoting import shown

_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class VerifyPolicy:
    """What is compared with eager.

    ``at_capture``: each graph, once. ``sample_rate``: this fraction of the steps in service.
    """

    at_capture: bool = False
    sample_rate: float = 0.0

    @classmethod
    def parse(cls, text: object) -> VerifyPolicy:
        """From ``off``, ``capture``, ``sample:RATE``, or the last two with a comma between them."""
        if text is None:
            return cls()
        if not isinstance(text, str):
            raise _unknown(text)
        if text == "off":
            return cls()
        at_capture, rate = False, 0.0
        for part in text.replace(" ", "").split(","):
            kind, _, value = part.partition(":")
            if kind == "capture" and not value and not at_capture:
                at_capture = True
            elif kind == "sample" and not rate:
                rate = _rate(value, text)
            else:
                raise _unknown(text)
        return cls(at_capture=at_capture, sample_rate=rate)

    def __bool__(self) -> bool:
        return self.at_capture or self.sample_rate > 0

    def samples(self, step: int) -> bool:
        """Whether step number ``step`` is compared.

        By a hash of the number alone: ranks that count the same steps compare the same ones, and no
        random generator is drawn from.
        """
        return _mixed(step) < self.sample_rate * 2**64


def _rate(value: str, text: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        raise _unknown(text) from None
    if not 0 < rate <= 1:
        raise ConfigError(f"verify={shown(text)} samples a fraction of {value}; give one in (0, 1]")
    return rate


def _unknown(text: object) -> ConfigError:
    return ConfigError(
        f"unknown verify {shown(text)}; choose 'off', 'capture', 'sample:RATE' with a rate in "
        "(0, 1], or 'capture,sample:RATE'"
    )


def _mixed(number: int) -> int:
    """The finalizer of splitmix64: spreads consecutive numbers evenly over 64 bits."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
