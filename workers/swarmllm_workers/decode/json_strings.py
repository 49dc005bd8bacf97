"""GBNF for the inside of a JSON string: of some length, of a pattern, of a format.

Patterns are read by Python's own parser of regular expressions; what has no counterpart in a grammar
(look-around, back-references, anchors inside) is refused.
"""

from __future__ import annotations

import re
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

CHARACTER: Final = '[^"\\\\\\x7F\\x00-\\x1F] | [\\\\] (["\\\\bfnrt] | "u" [0-9a-fA-F]{4})'
_PLAIN: Final = '[^"\\\\\\x7F\\x00-\\x1F]'
_UNANCHORED_MAX: Final = 256
_REPEATS_MAX: Final = 1000

_HOST = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?){1,4}"
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
"""Days that every month has."""
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P([0-9]{1,4}W|[0-9]{1,4}Y([0-9]{1,2}M)?([0-9]{1,3}D)?|[0-9]{1,4}M([0-9]{1,3}D)?"
    r"|[0-9]{1,4}D|T[0-9]{1,4}H([0-9]{1,2}M([0-9]{1,2}S)?)?|T[0-9]{1,4}M([0-9]{1,2}S)?|T[0-9]{1,6}S)$",
    "email": rf"^[A-Za-z0-9]([A-Za-z0-9_+-]{{0,30}}[A-Za-z0-9])?@{_HOST}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
}

_CLASSES: Final = {
    codes.CATEGORY_DIGIT: [(48, 57)],
    codes.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
    codes.CATEGORY_SPACE: [(32, 32)],
}
_ESCAPED: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
"""Characters that JSON writes differently."""


def literal(text: str) -> str:
    """A text as a GBNF literal."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08X}" for c in text) + '"'


def bounded_text(low: int, high: int | None) -> str:
    return f"({CHARACTER}){{{low},{'' if high is None else high}}}"


def of_pattern(pattern: str) -> str:
    """Raises ValueError for a pattern that is none, or that no grammar can follow."""
    try:
        items = list(parser.parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no pattern ({error})") from None
    is_anchored = [
        bool(items) and items[at] == (codes.AT, place)
        for at, place in ((0, codes.AT_BEGINNING), (-1, codes.AT_END))
    ]
    anything = f"({CHARACTER}){{0,{_UNANCHORED_MAX}}}"
    inside = items[int(is_anchored[0]) : len(items) - int(is_anchored[1])]
    parts = ["" if is_anchored[0] else anything, _sequence(inside), "" if is_anchored[1] else anything]
    return "(" + " ".join(part for part in parts if part) + ")"


def _sequence(items: list[Any]) -> str:
    return " ".join(_item(code, value) for code, value in items) or '""'


def _item(code: Any, value: Any) -> str:
    if code is codes.LITERAL:
        return literal(_escaped(chr(value)))
    if code is codes.NOT_LITERAL:
        return _class([(value, value)], is_negated=True)
    if code is codes.ANY:
        return f"({CHARACTER})"
    if code is codes.IN:
        is_negated = value[0] == (codes.NEGATE, None)
        return _class([pair for item in value[is_negated:] for pair in _ranges(*item)], is_negated=is_negated)
    if code is codes.BRANCH:
        return "(" + " | ".join(_sequence(list(branch)) for branch in value[1]) + ")"
    if code is codes.SUBPATTERN:
        return f"({_sequence(list(value[3]))})"
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        low, high, inner = value
        if low > _REPEATS_MAX or (high != codes.MAXREPEAT and high > _REPEATS_MAX):
            raise ValueError(f"more than {_REPEATS_MAX} repetitions")
        return f"({_sequence(list(inner))}){{{low},{'' if high == codes.MAXREPEAT else high}}}"
    raise ValueError(f"{str(code).lower()} is not supported")


def _ranges(code: Any, value: Any) -> list[tuple[int, int]]:
    if code is codes.LITERAL:
        return [(value, value)]
    if code is codes.RANGE:
        return [value]
    if code is codes.CATEGORY and value in _CLASSES:
        return _CLASSES[value]
    raise ValueError(f"{str(value or code).lower()} is not supported")


def _class(ranges: list[tuple[int, int]], *, is_negated: bool) -> str:
    if is_negated:
        return f'[^{_shown(ranges)}"\\\\\\x7F\\x00-\\x1F]'
    special = [c for c in _ESCAPED if any(low <= ord(c) <= high for low, high in ranges)]
    plain = _without_special(ranges)
    options = [f"[{_shown(plain)}]"] if plain else []
    return "(" + " | ".join([*options, *(literal(_escaped(c)) for c in special)]) + ")"


def _shown(ranges: list[tuple[int, int]]) -> str:
    return "".join(f"\\U{low:08X}-\\U{high:08X}" for low, high in ranges)


def _without_special(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges without what JSON has to escape."""
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        low = max(low, 0x20)
        for gap in (0x22, 0x5C, 0x7F):
            if low <= gap <= high:
                left += [(low, gap - 1)] if low < gap else []
                low = gap + 1
        left += [(low, high)] if low <= high else []
    return left


def _escaped(character: str) -> str:
    return _ESCAPED.get(character, character)
