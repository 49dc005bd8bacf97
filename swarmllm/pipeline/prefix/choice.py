"""Whether KV of a prompt's beginning is worth fetching, from whom, and for how long a fetch may go on. Pure.

What it takes is predicted before anybody is asked: bytes by the throughput that was measured, and round
trips, against what computing those rows takes here. A prediction may be wrong by a factor of two and the
fetch still pays; a fetch that turns out slower is given up, and a peer that kept this node waiting is left
alone for a while. So a stuck or vanished peer is a miss, and one request waits for it for no longer than
computing takes, or LEAST_S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import PREFIX_KV_MAX

WORTH: Final = 0.5
"""A fetch may be predicted to take this part of the prefill that it saves."""
UNMEASURED_WINDOW: Final = 256 * 1024
"""Bytes per round trip, of a peer from which nothing large has come yet: 100 Mbit/s at 20 ms ..."""
UNMEASURED_MAX: Final = 125e6
"""... and no more than 1 Gbit/s."""
FAR_S: Final = 0.05
"""A round trip that nobody has measured."""
HANDLING_S: Final = 0.005
"""What a slice takes besides travelling: the holder's worker answers between two of its steps."""
LANES: Final = 4
"""Slices that are on their way at once."""
LEAST_S: Final = 0.3
"""Predictions of less say little: a fetch may always take so long."""
REST_S: Final = 60.0
"""How long a peer is not asked that did not give what it announced."""
PEERS_MAX: Final = 1024
"""Of which that is known."""
PREFIX_BYTES_MAX: Final = 256 * 2**20
"""Of one beginning."""
_STATE_BYTES: Final = 128 * 1024
"""Of a slice, beside its rows: positions, and what is said of each layer."""


@dataclass(frozen=True, slots=True)
class PrefixFetchSettings:
    is_on: bool = False
    asker_timeout_s: float = 3.0
    """What a request waits for all of it: looking here, the network, and taking the rows in."""
    network_timeout_s: float = 2.5
    """What the slices may take together."""
    serving_timeout_s: float = 2.0
    """What this node's worker may take to give one slice."""


@dataclass(frozen=True, slots=True)
class HolderPath:
    """To one holder."""

    node_id: NodeId
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    """None: not measured."""

    def takes_s(self, n_bytes: int, n_slices: int) -> float:
        rtt_s = FAR_S if self.rtt_s is None else self.rtt_s
        unmeasured = UNMEASURED_WINDOW / max(rtt_s, UNMEASURED_WINDOW / UNMEASURED_MAX)
        bytes_per_s = self.bytes_per_s or unmeasured
        n_rounds = -(-n_slices // LANES)
        return n_bytes / bytes_per_s + n_rounds * (rtt_s + HANDLING_S)


@dataclass(frozen=True, slots=True)
class Slices:
    """How so many rows are asked for."""

    n_rows: int
    row_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def rows_each(self) -> int:
        """0: one row is too large for an answer."""
        return (PREFIX_KV_MAX - _STATE_BYTES) // self.row_bytes

    def all(self) -> list[tuple[int, int]]:
        """(first row, how many), in order."""
        each = self.rows_each
        return [(at, min(each, self.n_rows - at)) for at in range(0, self.n_rows, each)] if each else []


@dataclass(frozen=True, slots=True)
class Offer:
    path: HolderPath
    predicted_s: float


def choose(
    paths: Iterable[HolderPath], slices: Slices, n_known: int, prefill_s_per_row: float | None
) -> Offer | None:
    """The holder from which these rows are there soonest. None: computing what is missing beside the
    `n_known` rows that are here is about as fast, or would be for all that is known."""
    asked = slices.all()
    if not asked or prefill_s_per_row is None or slices.n_bytes > PREFIX_BYTES_MAX:
        return None
    saved_s = (slices.n_rows - n_known) * prefill_s_per_row
    offers = (Offer(path, path.takes_s(slices.n_bytes, len(asked))) for path in paths)
    best = min(offers, key=lambda offer: (offer.predicted_s, offer.path.node_id), default=None)
    return best if best is not None and best.predicted_s <= WORTH * saved_s else None


Progress = Literal["going", "complete", "too slow"]


@dataclass(slots=True)
class FetchClock:
    """One fetch, as time passes; times are of any steady clock, in seconds."""

    began_s: float
    limit_s: float
    """For all of it."""
    predicted_s: float
    n_bytes: int
    """That are due."""
    n_received: int = 0

    @classmethod
    def start(cls, now_s: float, limit_s: float, offer: Offer, n_bytes: int) -> FetchClock:
        """It may take no longer than `limit_s`, and no longer than twice what was predicted."""
        return cls(now_s, min(limit_s, max(LEAST_S, 2 * offer.predicted_s)), offer.predicted_s, n_bytes)

    @property
    def deadline_s(self) -> float:
        return self.began_s + self.limit_s

    def arrived(self, n_bytes: int, now_s: float) -> Progress:
        """A slice is there."""
        self.n_received += n_bytes
        if self.n_received >= self.n_bytes:
            return "complete"
        return self.at(now_s)

    def at(self, now_s: float) -> Progress:
        """What is left must be able to come in the time that is left, at the pace so far."""
        elapsed_s = now_s - self.began_s
        if elapsed_s >= self.limit_s:
            return "too slow"
        if not self.n_received or elapsed_s <= LEAST_S:
            return "going"
        projected_s = elapsed_s * self.n_bytes / self.n_received
        return "too slow" if projected_s > self.limit_s else "going"


@dataclass(slots=True)
class Resting:
    """Peers that are not asked for a while."""

    _until_s: dict[NodeId, float] = field(default_factory=dict)

    def add(self, node_id: NodeId, now_s: float) -> None:
        self._until_s = {each: until_s for each, until_s in self._until_s.items() if until_s > now_s}
        if len(self._until_s) < PEERS_MAX:
            self._until_s[node_id] = now_s + REST_S

    def has(self, node_id: NodeId, now_s: float) -> bool:
        return self._until_s.get(node_id, now_s) > now_s


def draw_blocks(n_blocks: int, chance: Callable[[], float]) -> tuple[int, ...]:
    """Which blocks are computed again: one of them, and the last. `chance` in [0, 1)."""
    drawn = int(chance() * n_blocks)
    return (n_blocks - 1,) if drawn == n_blocks - 1 else (drawn, n_blocks - 1)


def whole_blocks(n_tokens: int) -> int:
    """Of a prompt, as many as can be taken from elsewhere: its last token is always computed."""
    return max(0, n_tokens - 1) // BLOCK_TOKENS
