"""Decides which holders of a projector are asked for one picture, and when the next one begins beside them.
Pure.

They are asked one after the other. A holder that is silent for longer than a live one would be, or takes far
longer than expected, is not given up: the next one begins beside it, and the first rows win. One picture is
encoded `AT_ONCE` times at most at the same time.

The clock comes in as `now_s`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from swarmllm_proto.identifiers import NodeId

AT_ONCE: Final = 3
"""Holders that encode the same picture beside each other."""
SILENCE_S: Final = 2.0
"""A holder that lives says every second that it does; what a slice takes to travel comes on top."""
LEAST_S: Final = 4.0
"""Encodings that take less are never late."""
FAR: Final = 2.0
"""So many times as long as expected."""
MOST_S: Final = 20.0
"""Whatever an encoding was expected to take. (What bytes take to travel was measured, and comes on top: a
second copy of a picture on the same slow line would make both later.)"""
BUSY_PAUSE_S: Final = 1.0
BUSY_S: Final = 30.0
"""So long nodes are asked again that are busy."""
USUAL_S: Final = 1.0
"""An encoding on a node of which nothing is known."""
NODES_MAX: Final = 1024


class EncodingTimes:
    """The seconds that encodings took on other nodes, without the network."""

    def __init__(self) -> None:
        self._took_s: OrderedDict[NodeId, float] = OrderedDict()

    def expected_s(self, node_id: NodeId) -> float:
        return self._took_s.get(node_id, USUAL_S)

    def took(self, node_id: NodeId, seconds: float) -> None:
        """Pictures differ in size, so a slow one counts at once and a fast one by and by."""
        before = self._took_s.pop(node_id, seconds)
        self._took_s[node_id] = max(seconds, 0.8 * before + 0.2 * seconds)
        if len(self._took_s) > NODES_MAX:
            self._took_s.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Runner:
    node_id: NodeId
    work_s: float = USUAL_S
    """What it is expected to do."""
    travel_s: float = 0.0
    """What the picture and its rows are expected to travel."""
    slice_s: float = 0.0
    """What one slice is expected to travel."""

    @property
    def silence_s(self) -> float:
        return SILENCE_S + FAR * self.slice_s

    @property
    def late_after_s(self) -> float:
        return max(LEAST_S, min(MOST_S, FAR * self.work_s) + FAR * self.travel_s)


@dataclass(slots=True)
class _Running:
    runner: Runner
    began_s: float
    heard_s: float

    def is_silent(self, now_s: float) -> bool:
        return now_s >= self.heard_s + self.runner.silence_s

    def worked_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.began_s - self.runner.travel_s)

    @property
    def late_s(self) -> float:
        """From then on another one begins beside it."""
        return min(self.began_s + self.runner.late_after_s, self.heard_s + self.runner.silence_s)


@dataclass(slots=True)
class Race:
    _waiting: list[tuple[float, Runner]]
    """(not before, who), in the order in which they begin."""
    _busy_until_s: float
    _running: dict[NodeId, _Running] = field(default_factory=dict)
    _busy: set[NodeId] = field(default_factory=set)
    """Who said last that it was busy."""

    @classmethod
    def of(cls, runners: Iterable[Runner], now_s: float) -> Race:
        return cls([(now_s, each) for each in runners], now_s + BUSY_S)

    @property
    def is_over(self) -> bool:
        """Nobody is left."""
        return not self._waiting and not self._running

    @property
    def is_busy(self) -> bool:
        """Somebody might have given rows at another time."""
        return bool(self._busy)

    def begin(self, now_s: float) -> Runner | None:
        """Who is to begin now; it counts as begun."""
        if now_s < self._next_s():
            return None
        at = min(range(len(self._waiting)), key=lambda index: self._waiting[index][0] > now_s)
        _, runner = self._waiting.pop(at)
        self._running[runner.node_id] = _Running(runner, now_s, now_s)
        self._busy.discard(runner.node_id)
        return runner

    def look_again_s(self) -> float:
        """`begin` has nobody before then; infinite: not before something is heard."""
        return self._next_s()

    def heard(self, node_id: NodeId, now_s: float) -> None:
        """It lives."""
        if (running := self._running.get(node_id)) is not None:
            running.heard_s = now_s

    def failed(self, node_id: NodeId, now_s: float, *, is_busy: bool = False) -> None:
        """`is_busy`: it may be asked again."""
        runner = self._running.pop(node_id).runner
        if is_busy:
            self._busy.add(node_id)
            if now_s < self._busy_until_s:
                self._waiting.append((now_s + BUSY_PAUSE_S, runner))

    def won(self, node_id: NodeId, now_s: float) -> float:
        """How long it took, seconds, without travelling."""
        return self._running.pop(node_id).worked_s(now_s)

    def overtaken(self, now_s: float) -> list[tuple[NodeId, float, bool]]:
        """Who was late when another one had won: (node, how long it has taken, whether it is silent)."""
        return [
            (node_id, each.worked_s(now_s), each.is_silent(now_s))
            for node_id, each in self._running.items()
            if now_s >= each.late_s
        ]

    def _next_s(self) -> float:
        if not self._waiting or len(self._running) >= AT_ONCE:
            return float("inf")
        late_s = max((each.late_s for each in self._running.values()), default=0.0)
        return max(late_s, min(not_before_s for not_before_s, _ in self._waiting))
