"""GBNF for numbers within bounds: digit by digit, since a grammar cannot compare."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor
from typing import Any, Final

DIGITS_MAX: Final = 15
FRACTION_MAX: Final = 15
LISTED_MAX: Final = 512


@dataclass(frozen=True)
class Decimals:
    """Bounds; None: there is none."""

    low: Decimal | None
    high: Decimal | None
    low_is_out: bool = False
    high_is_out: bool = False

    @staticmethod
    def of(schema: dict[str, Any]) -> Decimals:
        low, low_is_out = _tighter(schema.get("minimum"), schema.get("exclusiveMinimum"), 1)
        high, high_is_out = _tighter(schema.get("maximum"), schema.get("exclusiveMaximum"), -1)
        return Decimals(low, high, low_is_out, high_is_out)

    @property
    def is_open(self) -> bool:
        return self.low is None and self.high is None

    def integer_bounds(self) -> tuple[int | None, int | None]:
        low = None if self.low is None else ceil(self.low) + (self.low_is_out and self.low == ceil(self.low))
        high = (
            None
            if self.high is None
            else floor(self.high) - (self.high_is_out and self.high == floor(self.high))
        )
        return low, high

    @staticmethod
    def places_of(step: object) -> int | None:
        """Decimal places of multiples of a power of ten up to 1; None for other steps."""
        for n_places in range(10):
            if (
                not isinstance(step, bool)
                and isinstance(step, int | float)
                and Decimal(str(step)) == Decimal(10) ** -n_places
            ):
                return n_places
        return None


def _tighter(bound: float | None, outer: float | None, sign: int) -> tuple[Decimal | None, bool]:
    if outer is not None and (bound is None or (outer - bound) * sign >= 0):
        return Decimal(str(outer)), True
    return (None if bound is None else Decimal(str(bound))), False


def integers(low: int | None, high: int | None) -> str:
    """Whole numbers in [low, high]; there is at least one."""
    options: list[str] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        options.append(f'"-" ({_naturals(least, None if low is None else -low)})')
    if high is None or high >= 0:
        options.append(_naturals(max(low or 0, 0), high))
    return " | ".join(options)


def multiples(step: int, low: int | None, high: int | None) -> str | None:
    """Multiples of `step` within the bounds; None where there is none, or too many of them to list."""
    if step < 1:
        return None
    if low is None or high is None or (high - low) // step > LISTED_MAX:
        return None
    found = range(-(-low // step) * step, high + 1, step)
    return " | ".join(f'"{number}"' for number in found) or None


def decimals(bounds: Decimals) -> str:
    """Numbers within the bounds, without an exponent; "" where there is none."""
    low, high = bounds.low, bounds.high
    options: list[str] = []
    if high is None or high > 0 or (high == 0 and not bounds.high_is_out):
        least, is_out = (Decimal(0), False) if low is None or low < 0 else (low, bounds.low_is_out)
        options.append(_positive(least, high, is_out, bounds.high_is_out))
    if low is None or low < 0:
        least, is_out = (Decimal(0), True) if high is None or high >= 0 else (-high, bounds.high_is_out)
        below = _positive(least, None if low is None else -low, is_out, bounds.low_is_out)
        options.append(f'"-" ({below})' if below else "")
    return " | ".join(option for option in options if option)


def _positive(low: Decimal, high: Decimal | None, low_is_out: bool, high_is_out: bool) -> str:
    if high is not None and (high < low or (high == low and (low_is_out or high_is_out))):
        return ""
    first, last = floor(low), None if high is None else floor(high)
    if last == first:
        assert high is not None
        return _within(first, low - first, high - first, low_is_out, high_is_out)
    options = [f'"{first}" ({_at_least(_digits(low - first), low_is_out)})']
    if last is None or last - first > 1:
        between = _naturals(first + 1, None if last is None else last - 1)
        options.append(f'({between}) ("." [0-9]{{1,{FRACTION_MAX}}})?')
    if high is not None and last is not None and (high > last or not high_is_out):
        options.append(f'"{last}" ({_at_most(_digits(high - last), high_is_out)})')
    return " | ".join(options)


def _within(whole: int, low: Decimal, high: Decimal, low_is_out: bool, high_is_out: bool) -> str:
    """Fractions of one whole number, all with the same number of places."""
    n_places = max(len(_digits(low)), len(_digits(high)), 2) + (low_is_out or high_is_out)
    unit = Decimal(10) ** n_places
    least, most = int(low * unit) + low_is_out, int(high * unit) - high_is_out
    if most < least:
        return ""
    return f'"{whole}." ({_same_length(str(least).zfill(n_places), str(most).zfill(n_places))})'


def _naturals(low: int, high: int | None) -> str:
    """Whole numbers from `low` >= 0 on, without leading zeros."""
    if high is None:
        length = len(str(low))
        ends = _same_length(str(low), "9" * length)
        return f"{ends} | [1-9] [0-9]{{{length},{DIGITS_MAX}}}" if length <= DIGITS_MAX else ends
    options: list[str] = []
    while low <= high:
        length = len(str(low))
        top = min(high, 10**length - 1)
        options.append(_same_length(str(low), str(top)))
        low = top + 1
    return " | ".join(options)


def _same_length(low: str, high: str) -> str:
    """Strings of digits between two of the same length, both included."""
    if not low:
        return '""'
    if low[0] == high[0]:
        return f'"{low[0]}" ({_same_length(low[1:], high[1:])})'
    rest = len(low) - 1
    first, last, options = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        options.append(f'"{first}" ({_same_length(low[1:], "9" * rest)})')
        first += 1
    if high[1:] != "9" * rest:
        options.append(f'"{last}" ({_same_length("0" * rest, high[1:])})')
        last -= 1
    if first <= last:
        options.append(f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else ""))
    return "(" + " | ".join(options) + ")"


def _digits(fraction: Decimal) -> str:
    """Of a number in [0, 1): what stands behind the point."""
    return f"{fraction:f}".partition(".")[2].rstrip("0")


def _at_least(digits: str, is_out: bool) -> str:
    """A fraction, with its point or absent, of these digits or more."""
    more = f"[0-9]{{0,{FRACTION_MAX}}}"
    above = f'"0"{{0,{FRACTION_MAX}}} [1-9] {more}'
    if not digits:
        return f'"." {above}' if is_out else f'("." [0-9] {more})?'
    options = [f'"{digits}" ' + (above if is_out else more)]
    for i, digit in enumerate(digits):
        if digit != "9":
            options.append((f'"{digits[:i]}" ' if i else "") + f"[{int(digit) + 1}-9] {more}")
    return f'"." ({" | ".join(options)})'


def _at_most(digits: str, is_out: bool) -> str:
    """A fraction, with its point or absent, of these digits or less."""
    more, zeros = f"[0-9]{{0,{FRACTION_MAX}}}", f'"0"{{0,{FRACTION_MAX}}}'
    if not digits:
        return f'("." "0" {zeros})?'
    options = [] if is_out else [f'"{digits}" {zeros}']
    for i, digit in enumerate(digits):
        if i:
            options.append(f'"{digits[:i]}"')
        if digit != "0":
            options.append((f'"{digits[:i]}" ' if i else "") + f"[0-{int(digit) - 1}] {more}")
    return f'("." ({" | ".join(options)}))?'
