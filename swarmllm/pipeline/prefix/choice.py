"""Decides whether to fetch KV of a prompt's beginning, from which node, and for how long. Pure.

What it takes is predicted before anybody is asked: bytes by the throughput that was measured, and round
trips, against what computing those rows takes here. A prediction may be wrong by a factor of two and the
fetch still pays.

Where no throughput was measured, round trips say little of it: pings of a machine that computes wait for its
processor. Such a holder is asked if it could pay at the best, for a single slice first, and loses by that no
more than any other. A holder that was measured, or is near, is preferred.

A holder that was late or busy is expected to be so again for some seconds (`lateness`).

While it runs, it is bounded by what it has brought: a request waits no longer than it would have computed for
the rows that are there, and a twentieth of what its whole prompt takes. So a stuck or vanished peer costs
that twentieth at most, the rows that came before are used, and a transfer that is slower than computing ends
after the same time. The first slices are small, so that this shows early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import UNSET

from swarmllm.pipeline.statistics import DeclineReason
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import KvType, PrefixLookedUp
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
AHEAD_S: Final = 0.005
"""How long before the others the first slice is asked for: questions that arrive together are answered in
any order, and nothing counts before the first block is here."""
ALLOWED: Final = 0.05
"""Of what the whole prompt takes to be computed, what may be lost on fetching."""
IN_TIME: Final = 0.9
"""Of the time that all of it may take; what is expected later than that is not asked for."""
TRIES: Final = 3
"""Holders that are asked for one prompt, one after the other."""
REST_S: Final = 60.0
"""How long a peer is not asked that lied, or does not have what it announced."""
PEERS_MAX: Final = 1024
"""Of which that is known."""
PREFIX_BYTES_MAX: Final = 256 * 2**20
"""Of one beginning."""
Q8_0_PART: Final = 34 / 64
"""Of the bytes of f16."""
_STATE_BYTES: Final = 128 * 1024
"""Of a slice, beside its rows: what is said of each layer, and ..."""
_PLACE_BYTES: Final = 16
"""... of each row, where it is and whose."""


@dataclass(frozen=True, slots=True)
class PrefixFetchSettings:
    is_on: bool = False
    asker_timeout_s: float = 3.0
    """What a request waits for all of it: looking here, the network, and taking the rows in."""
    network_timeout_s: float = 2.5
    """What the slices may take together."""
    serving_timeout_s: float = 2.0
    """What this node's worker may take to give one slice."""
    any_format: bool = True
    """Rows are taken that other kernels computed, or that are kept as another type, too ..."""
    rounds: bool = False
    """... and asked for as q8_0, also where both keep f16."""


@dataclass(frozen=True, slots=True)
class HolderPath:
    """The path to one holder."""

    node_id: NodeId
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    """None: not measured."""
    late_s: float = 0.0
    """What the holder is expected to take until it begins to give."""

    def takes_s(self, n_bytes: int, n_slices: int) -> float:
        rtt_s = FAR_S if self.rtt_s is None else self.rtt_s
        unmeasured = UNMEASURED_WINDOW / max(rtt_s, UNMEASURED_WINDOW / UNMEASURED_MAX)
        bytes_per_s = self.bytes_per_s or unmeasured
        n_rounds = -(-n_slices // LANES)
        return self.late_s + n_bytes / bytes_per_s + n_rounds * (rtt_s + HANDLING_S)

    @property
    def at_best(self) -> HolderPath:
        """The same, as fast as it may be for all that is known."""
        return self if self.bytes_per_s else replace(self, bytes_per_s=UNMEASURED_MAX)


@dataclass(frozen=True, slots=True)
class WireRows:
    """How rows are asked for."""

    row_bytes: int
    """That travel, at most."""
    takes: KvType | None = None
    """See PrefixKvFetch; None: only rows in the asker's own format."""
    kv_encoding: str = ""
    """With `takes`."""
    read_bytes: int = 0
    """Of a row as the holder's worker reads it, at most; 0: the same."""


def wire_rows(here: PrefixLookedUp, settings: PrefixFetchSettings) -> WireRows:
    """How rows are asked for. `here`: what this node's worker says of the same prompt."""
    kv_type, encoding, row_bytes = here.kv_type, here.kv_encoding, here.row_bytes
    if not settings.any_format or kv_type is UNSET or encoding is UNSET:
        return WireRows(row_bytes)
    if kv_type == "q8_0":
        return WireRows(row_bytes, "q8_0", encoding, math.ceil(row_bytes / Q8_0_PART))
    if settings.rounds:
        return WireRows(math.ceil(row_bytes * Q8_0_PART), "q8_0", encoding, row_bytes)
    return WireRows(row_bytes, "f16", encoding)


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices in which rows are requested."""

    n_rows: int
    row_bytes: int
    read_bytes: int = 0
    """Of a row as the holder's worker reads it; 0: the same."""

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    def bytes_max(self, n_rows: int) -> int:
        """What a slice of so many rows may have."""
        return _STATE_BYTES + n_rows * (self.row_bytes + _PLACE_BYTES)

    @property
    def rows_each(self) -> int:
        """At most. 0: one row is too large for an answer."""
        return (PREFIX_KV_MAX - _STATE_BYTES) // max(self.row_bytes, self.read_bytes)

    def all(self) -> list[tuple[int, int]]:
        """(first row, how many), in order. Every end of a block is the end of a slice: a block each while the
        first ones are on their way, then more at a time; large blocks come in parts."""
        each = self.rows_each
        found: list[tuple[int, int]] = []
        at = 0
        while each and at < self.n_rows:
            to_block_end = BLOCK_TOKENS - at % BLOCK_TOKENS
            n_blocks = min(each // BLOCK_TOKENS, 1 << len(found) // LANES)
            n = n_blocks * BLOCK_TOKENS if n_blocks else min(each, to_block_end)
            found.append((at, min(n, self.n_rows - at)))
            at += n
        return found

    @property
    def first(self) -> list[tuple[int, int]]:
        """As many as are needed for the first whole block. They are asked for before any other, and come
        one after the other."""
        found: list[tuple[int, int]] = []
        at = 0
        for first_row, n_rows in self.all():
            if at >= BLOCK_TOKENS:
                break
            found.append((first_row, n_rows))
            at = first_row + n_rows
        return found

    def first_take_s(self, path: HolderPath) -> float:
        """Until those are here."""
        first = self.first
        return path.takes_s(sum(n_rows for _, n_rows in first) * self.row_bytes, len(first))


@dataclass(frozen=True, slots=True)
class Offer:
    path: HolderPath
    predicted_s: float
    """For all rows; by a guess where nothing was measured."""


def choose(
    paths: Iterable[HolderPath],
    slices: Slices,
    n_known: int,
    prefill_s_per_row: float | None,
    spare_s: float = math.inf,
) -> Offer | None:
    """The holder from which these rows are there soonest. None: computing what is missing beside the
    `n_known` rows that are here is about as fast from anybody, or `spare_s`, which may be lost, are over
    before anything is here; of what was not measured, the best is taken."""
    asked = slices.all()
    if not asked or prefill_s_per_row is None or slices.n_bytes > PREFIX_BYTES_MAX:
        return None
    saved_s = (slices.n_rows - n_known) * prefill_s_per_row
    offers = (
        Offer(path, path.takes_s(slices.n_bytes, len(asked)))
        for path in paths
        if slices.first_take_s(path.at_best) <= spare_s
        and path.at_best.takes_s(slices.n_bytes, len(asked)) <= WORTH * saved_s
    )
    return min(offers, key=lambda offer: (offer.predicted_s, offer.path.node_id), default=None)


@dataclass(frozen=True, slots=True)
class Declined:
    """Why `choose` found nobody. Times in seconds, by what is known of the holders at their best."""

    reason: DeclineReason
    saved_s: float
    """What computing these rows takes."""
    all_s: float
    """Until all of them would be here; infinite without a holder."""
    first_s: float
    """Until the first block would be."""
    spare_s: float
    """How late that might be."""

    def __str__(self) -> str:
        return (
            f"{self.reason}: computing takes {self.saved_s:.2f} s, fetching {self.all_s:.2f} s, "
            f"of which the first block {self.first_s:.3f} s of {self.spare_s:.3f} s"
        )


def why_declined(
    paths: Iterable[HolderPath],
    slices: Slices,
    n_known: int,
    prefill_s_per_row: float | None,
    spare_s: float = math.inf,
) -> Declined:
    """Of the same arguments for which `choose` gives None."""
    if prefill_s_per_row is None:
        return Declined("own_speed_unknown", math.inf, math.inf, math.inf, spare_s)
    n_slices = len(slices.all())
    best = [path.at_best for path in paths]
    all_s = min((path.takes_s(slices.n_bytes, n_slices) for path in best), default=math.inf)
    first_s = min(map(slices.first_take_s, best), default=math.inf)
    reason: DeclineReason = "first_block_late" if first_s > spare_s else "no_gain"
    return Declined(reason, (slices.n_rows - n_known) * prefill_s_per_row, all_s, first_s, spare_s)


def first_timeout_s(offer: Offer, paths: Iterable[HolderPath], slices: Slices, spare_s: float) -> float:
    """How long the holder of the offer may give nothing: half of what may be lost where another one could
    give the first rows in the other half, and this one was expected in half of its own."""
    half_s = spare_s / 2
    others = (path for path in paths if path.node_id != offer.path.node_id)
    is_soon = 2 * slices.first_take_s(offer.path.at_best) <= half_s
    return (
        half_s if is_soon and any(slices.first_take_s(each.at_best) <= half_s for each in others) else spare_s
    )


@dataclass(slots=True)
class FetchClock:
    """Limits the time of all fetches for one prompt; times are of any steady clock, in seconds."""

    began_s: float
    limit_s: float
    """For all of it, whatever it brings."""
    cold_s: float
    """What the prompt takes to be computed, but for the rows that were here."""
    s_per_row: float
    """Of computing."""
    n_rows: int = 0
    """That are here now and were not before: the most that any holder gave, without a gap."""

    @classmethod
    def started(
        cls, asked_s: float, turn_s: float, now_s: float, limit_s: float, cold_s: float, s_per_row: float
    ) -> FetchClock:
        """Of a fetch that begins now. `asked_s`: when the request came; `turn_s`: when this worker was asked
        what it has. `limit_s`: for all of it from `asked_s` on. A worker that answers late is at work, and
        the prompt would have waited for it as well: no more than half of what may be lost is counted."""
        counted_s = min(now_s - turn_s, ALLOWED * cold_s / 2)
        began_s = now_s - counted_s - (turn_s - asked_s)
        return cls(began_s, limit_s - (began_s - asked_s), cold_s, s_per_row)

    def came(self, n_rows: int) -> None:
        """Of one holder, from the first missing row on without a gap."""
        self.n_rows = max(self.n_rows, n_rows)

    @property
    def deadline_s(self) -> float:
        """When it is over, unless more comes by then."""
        earned_s = self.n_rows * self.s_per_row + ALLOWED * self.cold_s
        return self.began_s + min(self.limit_s, earned_s)

    def has_time_for(self, n_due: int, n_came: int, since_s: float, now_s: float) -> bool:
        """Whether so many rows come before all of it is over, as fast as `n_came` came since then; true where
        none did."""
        left_s = self.began_s + IN_TIME * self.limit_s - now_s
        return not n_came or n_due * (now_s - since_s) <= n_came * left_s

    def spare_s(self, now_s: float) -> float:
        """How long from now on nothing may come."""
        return max(0.0, self.deadline_s - now_s)


@dataclass(slots=True)
class AvoidedPeers:
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
