"""Decides which log lines are written, so that nobody outside can fill the log: pure.

Each key (who provoked the line, and the line of code that writes it) has a token bucket. Lines that were
provoked from outside share one more bucket, because identities cost nothing. What is left out is counted: the
next line of the same key says how many are missing, and `due` lists the keys that went silent meanwhile.

The number of keys is bounded. The key that was used longest ago is forgotten first; its count goes to `due`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

KEYS_MAX: Final = 2048
FORGOTTEN_MAX: Final = 64
"""Keys that made room and whose numbers nobody has asked for yet; the first of more are lost."""
SUMMARY_S: Final = 60.0
"""A key that was silent for so long is listed by `due`, if lines of it were left out."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A token bucket: `burst` lines at once, then `per_s` lines a second."""

    burst: int
    per_s: float


PROVOKED: Final = Rate(5, 1 / 30)
"""Of one line of code, for one peer or client."""
PROVOKED_IN_ALL: Final = Rate(500, 2.0)
"""Of all peers and clients together: at most 172,800 lines a day."""
OWN: Final = Rate(500, 5.0)
"""Of one line of code, where nobody outside is named as the cause: of libraries, workers, this node."""


@dataclass(slots=True)
class Bucket:
    rate: Rate
    n_tokens: float
    at_s: float

    @classmethod
    def full(cls, rate: Rate, now: float) -> Bucket:
        return cls(rate, rate.burst, now)

    def fill(self, now: float) -> float:
        """The tokens that it holds now."""
        passed_s = max(0.0, now - self.at_s)
        self.n_tokens = min(float(self.rate.burst), self.n_tokens + passed_s * self.rate.per_s)
        self.at_s = max(self.at_s, now)
        return self.n_tokens


@dataclass(slots=True)
class _Line:
    bucket: Bucket
    n_left_out: int = 0


@dataclass(frozen=True, slots=True)
class SuppressedLines:
    key: Hashable
    n_lines: int


class LogLimit:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(
        self,
        *,
        provoked: Rate = PROVOKED,
        in_all: Rate = PROVOKED_IN_ALL,
        own: Rate = OWN,
        keys_max: int = KEYS_MAX,
    ) -> None:
        self._provoked = provoked
        self._own = own
        self._in_all_rate = in_all
        self._in_all: Bucket | None = None
        self._keys_max = keys_max
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()
        """By key; the key that was used longest ago comes first."""
        self._forgotten: deque[SuppressedLines] = deque(maxlen=FORGOTTEN_MAX)
        self.n_left_out = 0
        """Lines since the start."""

    def __repr__(self) -> str:
        return f"<LogLimit {len(self._lines)} keys, {self.n_left_out} lines left out>"

    def __len__(self) -> int:
        return len(self._lines)

    def admit(self, key: Hashable, now: float, *, is_provoked: bool) -> int | None:
        """None: leave the line out. Otherwise write it, and say that so many lines of this key were left out
        since the last one."""
        line = self._lines.get(key)
        if line is None:
            line = _Line(Bucket.full(self._provoked if is_provoked else self._own, now))
            self._make_room()
            self._lines[key] = line
        self._lines.move_to_end(key)
        if self._in_all is None:
            self._in_all = Bucket.full(self._in_all_rate, now)
        has_own_token = line.bucket.fill(now) >= 1
        if not has_own_token or (is_provoked and self._in_all.fill(now) < 1):
            line.n_left_out += 1
            self.n_left_out += 1
            return None
        line.bucket.n_tokens -= 1
        if is_provoked:
            self._in_all.n_tokens -= 1
        n_left_out, line.n_left_out = line.n_left_out, 0
        return n_left_out

    def due(self, now: float) -> list[SuppressedLines]:
        """What was left out of keys that have been silent for SUMMARY_S, once each."""
        due = list(self._forgotten)
        self._forgotten.clear()
        for key, line in list(self._lines.items()):
            if now - line.bucket.at_s < SUMMARY_S:
                break
            if line.n_left_out:
                due.append(SuppressedLines(key, line.n_left_out))
            del self._lines[key]
        return due

    def _make_room(self) -> None:
        while len(self._lines) >= self._keys_max:
            key, line = self._lines.popitem(last=False)
            if line.n_left_out:
                self._forgotten.append(SuppressedLines(key, line.n_left_out))
