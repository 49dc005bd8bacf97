"""Decides which KV of earlier requests is kept, and finds what a new prompt can use of it. A pure index.

Entries are named by the chained hashes of their complete blocks (see `swarmllm_proto.blocks`): equal hashes
are equal prefixes, and whole blocks are shared. A turn of a session may go on from the last row of the one
before, and requests of one node's clients share every token that is the same: a system prompt seldom ends
where a block does. Requests of clients of different nodes do not: how much of a prompt was known is told, and
token by token it could be guessed from that. (Clients of one node can guess each other's prompts so at that
node, too.)

An entry's rows are in cells of the KV, under a spare sequence number, until others need the room; then they
become bytes in host memory, as long as those fit a budget, and last, nothing. What goes first is what was
used least recently, sessions after everything else.

Rows that come from an earlier request may lie in other cells and may have been computed in other batches
than a fresh prefill's would: logits are equal to the bit where neither is the case, to rounding otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes

Buffer: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class PrefixSettings:
    n_cells_entries: int = 0
    """Entries that may be in cells: spare sequences of the context."""
    n_entries: int = 0
    """Entries in all. 0: nothing is kept."""
    max_bytes: int = 0
    """Host memory for rows that had to leave their cells."""
    min_tokens: int = 32
    """Less is not worth sharing."""
    ttl_s: float = 600.0
    """How long an entry is kept that nobody asks for."""
    session_ttl_s: float = 600.0
    """The same for sessions."""


@dataclass(frozen=True, eq=False)
class Name:
    """Identifies the rows of a request."""

    hashes: tuple[bytes, ...]
    """Of the complete blocks."""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """i32, where the tokens are known here; a stage of a chain knows hashes only."""
    session: str = ""
    clients_of: str | None = None
    """The node whose clients' request it is; "": this one. Such requests share every token with each other.
    None: it shares whole blocks only."""
    scope: str = ""
    """Who gave the name; "": this node. Names of different origin have nothing to do with each other."""

    def common(self, other: Name) -> int:
        """The number of rows that both begin with."""
        if self.scope != other.scope:
            return 0
        n = n_common(self.hashes, other.hashes) * BLOCK_TOKENS
        if self.goes_by_token(other):
            n = max(n, n_common_tokens(self.tokens, other.tokens))
        return n

    def goes_by_token(self, other: Name) -> bool:
        """Whether one may go on from any token of the other, not only from the end of a block."""
        is_of_same_node = self.clients_of is not None and self.clients_of == other.clients_of
        return is_of_same_node or bool(self.session and self.session == other.session)


def token_name(root: bytes, tokens: np.ndarray, session: str = "", *, clients_of: str | None = None) -> Name:
    """`root` of the model and its layers; `tokens` i32 [n]."""
    return Name(extend_block_hashes(root, tokens), tokens, session, clients_of)


@dataclass(eq=False)
class Kept:
    where: Hashable
    """The segments that hold the rows."""
    name: Name
    n_rows: int
    used_at: float
    sequence: int | None = None
    """None: not in cells."""
    states: tuple[Buffer, ...] = ()
    """Per segment, where the rows are in host memory."""
    n_min: int = 0
    """A beginning of fewer rows cannot be used: of those before, windowed layers lack what they look at."""
    unchecked: bytes = b""
    """Its first rows came from another node and were not checked: the name of their last block. b"": it is
    this worker's own, or was checked."""
    other_format: bool = False
    """Its first rows came from another node in another format: they have not the bits that this worker would
    compute."""

    @property
    def n_bytes(self) -> int:
        return sum(map(len, self.states))

    @property
    def is_own(self) -> bool:
        """This worker answers for it: it computed the rows, or checked that it would compute the same."""
        return not self.unchecked and not self.other_format


class Prefixes:
    """Sequences `first` to `first + n_cells_entries - 1`. Times are of any steady clock, in seconds. Every
    method that drops entries returns those, for their cells to be freed."""

    def __init__(self, first: int, settings: PrefixSettings) -> None:
        self._settings = settings
        self._free = list(range(first, first + settings.n_cells_entries))
        self._kept: list[Kept] = []
        self.n_changes = 0
        """Entries that came or went, ever."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept)

    @property
    def n_bytes(self) -> int:
        return sum(kept.n_bytes for kept in self._kept)

    @property
    def has_free_sequence(self) -> bool:
        return bool(self._free)

    def find(
        self,
        where: Hashable,
        wanted: Name,
        n_max: int,
        now: float,
        *,
        any_length: bool = False,
        own_kv: bool = False,
    ) -> tuple[Kept, int] | None:
        """The entry that shares the most rows with `wanted`, at most `n_max` of them, and how many. Of
        several, one in this worker's own format, or in cells. `any_length`: only entries of which fewer rows
        would do, too. `own_kv`: only own ones."""
        best, n_best = None, self._settings.min_tokens - 1
        for kept in self._kept:
            if kept.where != where or (any_length and kept.n_min) or (own_kv and not kept.is_own):
                continue
            n = self._usable(kept, wanted, n_max)
            if n > n_best or (n == n_best and best is not None and _rank(kept) > _rank(best)):
                best, n_best = kept, n
        if best is None or n_best <= 0:
            return None
        best.used_at = now
        return best, n_best

    def _usable(self, kept: Kept, wanted: Name, n_max: int) -> int:
        n = min(kept.name.common(wanted), kept.n_rows)
        if n > n_max:
            n = n_max if kept.name.goes_by_token(wanted) else _blocks(n_max)
        return n if n >= kept.n_min else 0

    def unchecked(self, where: Hashable, name: Name) -> Kept | None:
        """The entry that begins with the rows that another node sent under exactly this name."""
        for kept in self._kept:
            if kept.where == where and name.hashes and kept.unchecked == name.hashes[-1]:
                return kept
        return None

    def judged(self, unchecked: bytes, tokens: np.ndarray, *, is_right: bool) -> list[Kept]:
        """Apply the result of a check to rows that another node sent. Correct rows become this worker's own,
        with their `tokens`. Entries that depend on wrong rows are dropped."""
        resting = [kept for kept in self._kept if kept.unchecked == unchecked]
        if not is_right:
            return self._dropped(resting)
        for kept in resting:
            kept.unchecked = b""
            if not len(kept.name.tokens):
                kept.name = replace(kept.name, tokens=tokens[: kept.n_rows].copy())
            self.n_changes += 1
        return []

    def is_known(self, where: Hashable, name: Name, now: float, *, own_kv: bool = False) -> bool:
        """Whether an entry already holds all of it. `own_kv`: only one that is own counts."""
        for kept in self._kept:
            if own_kv and not kept.is_own:
                continue
            if kept.where == where and not kept.n_min and _contains(kept.name, name):
                kept.used_at = now
                return True
        return False

    def replaced_by(self, where: Hashable, name: Name, *, other_format: bool = False) -> list[Kept]:
        """The entries that were dropped because they are prefixes of the new one, or the turn before it of
        the same session. One that is of another format replaces none in this worker's own."""
        old = [
            kept
            for kept in self._kept
            if kept.where == where
            and (kept.other_format or not other_format)
            and (_contains(name, kept.name) or (name.session and kept.name.session == name.session))
        ]
        return self._dropped(old)

    def add(self, kept: Kept) -> list[Kept]:
        """Add an entry. `kept` has a sequence from `take_sequence`, or states in host memory."""
        self._kept.append(kept)
        self.n_changes += 1
        return self._trim()

    def __contains__(self, kept: Kept) -> bool:
        return any(each is kept for each in self._kept)

    def take_sequence(self) -> int:
        return self._free.pop(0)

    def give_back(self, sequence: int) -> None:
        """Return a sequence that was taken and not used."""
        self._release(sequence)

    def swap_out(self, kept: Kept, states: tuple[Buffer, ...], n_min: int) -> list[Kept]:
        """Record that the rows of an entry are in host memory now. The caller frees its cells."""
        assert kept.sequence is not None
        self._release(kept.sequence)
        kept.sequence, kept.states, kept.n_min = None, states, n_min
        return self._trim()

    def expired(self, now: float) -> list[Kept]:
        """Drop the entries that were unused for too long, and return them."""
        return self._dropped([kept for kept in self._kept if now - kept.used_at > self._ttl_s(kept)])

    def next_expiry(self) -> float | None:
        return min((kept.used_at + self._ttl_s(kept) for kept in self._kept), default=None)

    def least_wanted(self, *, in_cells: bool) -> Kept | None:
        """The entry to evict next, among those in cells or those in host memory."""
        return min(
            (kept for kept in self._kept if (kept.sequence is not None) == in_cells),
            key=_wish,
            default=None,
        )

    def drop(self, kept: Kept) -> list[Kept]:
        return self._dropped([kept])

    def clear(self) -> list[Kept]:
        return self._dropped(list(self._kept))

    def fits(self, n_bytes: int) -> bool:
        return n_bytes <= self._settings.max_bytes

    def _ttl_s(self, kept: Kept) -> float:
        return self._settings.session_ttl_s if kept.name.session else self._settings.ttl_s

    def _trim(self) -> list[Kept]:
        dropped: list[Kept] = []
        while len(self._kept) > self._settings.n_entries:
            dropped += self._dropped([min(self._kept, key=_wish)])
        while self.n_bytes > self._settings.max_bytes:
            oldest = self.least_wanted(in_cells=False)
            assert oldest is not None
            dropped += self._dropped([oldest])
        return dropped

    def _dropped(self, gone: list[Kept]) -> list[Kept]:
        for kept in gone:
            self._kept.remove(kept)
            self.n_changes += 1
            if kept.sequence is not None:
                self._release(kept.sequence)
        return gone

    def _release(self, sequence: int) -> None:
        self._free.append(sequence)
        self._free.sort()


def _rank(kept: Kept) -> tuple[bool, bool]:
    return not kept.other_format, kept.sequence is not None


def _wish(kept: Kept) -> tuple[bool, float]:
    return bool(kept.name.session), kept.used_at


def _blocks(n_rows: int) -> int:
    return n_rows // BLOCK_TOKENS * BLOCK_TOKENS


def _contains(longer: Name, shorter: Name) -> bool:
    """Whether a request that could use `shorter` could use `longer` just as well."""
    if shorter.scope != longer.scope or shorter.clients_of not in (None, longer.clients_of):
        return False
    if shorter.session and (
        shorter.session != longer.session
        or n_common_tokens(longer.tokens, shorter.tokens) < len(shorter.tokens)
    ):
        return False
    return longer.hashes[: len(shorter.hashes)] == shorter.hashes


def n_common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n


def n_common_tokens(left: np.ndarray, right: np.ndarray) -> int:
    n = min(len(left), len(right))
    differing = np.flatnonzero(left[:n] != right[:n])
    return int(differing[0]) if len(differing) else n
