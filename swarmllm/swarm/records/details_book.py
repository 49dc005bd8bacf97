"""Keeps the details of the nodes whose models are used here, and decides of whom to ask for them: pure state,
bounded.

In a large swarm a node's envelope has a brief record (see `record_parts`), and names the number of its newest
details. They are a signed statement of their own, so whoever has them may hand them on. A node that is of
interest is asked about, until its details are here, and again when it has named newer ones. It cannot make
others ask more often than each may be asked about, and all together cannot make this node receive more than
`BytesPace` lets it: who names new details all the time is answered late.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.envelope import BadStatement, Details, Envelope, Verify, unseal
from swarmllm_proto.errors import BadMessage, ProtocolError, UnsupportedVersion
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.record_parts import decode_details, join_record

NODES_MAX: Final = 512
"""Whose details are kept: 17 MiB at most, 1 MiB of honest ones. Of the nodes in the plans of one model, 256
are reachable that were never connected."""
ASKED_MAX: Final = 64
"""Nodes in one question."""
DUE_MAX: Final = 4 * ASKED_MAX
"""Nodes that are due at once."""
REFRESH_S: Final = 40.0
"""A node is asked about again at the earliest so long after its details came."""
EACH_BYTES_PER_S: Final = 40.0
"""What one node can make others receive: large details are fetched more rarely."""
RETRY_S: Final = 5.0
RETRY_MAX_S: Final = 300.0
"""After an answer that did not have them; the wait doubles from RETRY_S."""
IN_VAIN_MAX: Final = 2
"""So many neighbours are asked before the writer is dialled."""
BURST_BYTES: Final = 1024 * 1024
BYTES_PER_S: Final = 512.0
"""Of all details, with what is saved up while there is nothing to ask for: once those of NODES_MAX nodes. A
newcomer is told as much of a thousand nodes when it joins."""


class BriefRecords(Protocol):
    """The part of the envelope book that this module uses."""

    def newest_details(self, node_id: NodeId) -> int: ...

    def envelope(self, node_id: NodeId) -> Envelope | None: ...

    def complete(self, node_id: NodeId, whole: bytes) -> bool: ...


class AskedDetails(msgspec.Struct, frozen=True, array_like=True):
    """A node whose details are asked for, and the newest ones that the asker has of it."""

    node_id: NodeId
    started_at_ms: Annotated[int, Meta(ge=0, le=2**53)]
    """0: it has none."""
    number: Annotated[int, Meta(ge=0, le=2**53)]


@dataclass(eq=False, slots=True)
class HeldDetails:
    """Of a node that is of interest."""

    statement: Details | None = None
    """None: they have not come."""
    sealed: bytes = b""
    ask_at_s: float = -math.inf
    """Not before."""
    n_in_vain: int = 0
    """Answers without them, in a row."""

    @property
    def version(self) -> tuple[int, int]:
        return (0, 0) if self.statement is None else (self.statement.started_at_ms, self.statement.number)


class BytesPace:
    """How much may be received: BYTES_PER_S, and BURST_BYTES at once. `now` in seconds."""

    def __init__(self) -> None:
        self._left = float(BURST_BYTES)
        self._at_s = -math.inf

    def __repr__(self) -> str:
        return f"<BytesPace {self._left:.0f} bytes>"

    def may_ask(self, now: float) -> bool:
        return self._left_at(now) > 0

    def received(self, n_bytes: int, now: float) -> None:
        """An answer of this size; how large it is nobody knows before."""
        self._left, self._at_s = self._left_at(now) - n_bytes, now

    def _left_at(self, now: float) -> float:
        if self._at_s == -math.inf:
            return self._left
        return min(float(BURST_BYTES), self._left + BYTES_PER_S * max(0.0, now - self._at_s))


class DetailsBook:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(
        self,
        node_id: NodeId,
        envelopes: BriefRecords,
        verify: Verify,
        peers: Parts[HeldDetails] | None = None,
        *,
        nodes_max: int = NODES_MAX,
    ) -> None:
        self._node_id = node_id
        self._envelopes = envelopes
        self._verify = verify
        self._held: Parts[HeldDetails] = Parts.alone() if peers is None else peers
        self._nodes_max = nodes_max
        self._pace = BytesPace()
        self._own: tuple[Details, bytes] | None = None

    def __repr__(self) -> str:
        return f"<DetailsBook of {len(self._held)} nodes>"

    def __len__(self) -> int:
        """Nodes whose details are here."""
        return sum(held.statement is not None for held in self._held.values())

    @property
    def of_interest(self) -> Collection[NodeId]:
        return self._held

    def write_own(self, details: Details, sealed: bytes) -> None:
        self._own = details, sealed

    def want(self, sets: Iterable[Collection[NodeId]], connected: Collection[NodeId]) -> list[NodeId]:
        """From now on the nodes of these sets are of interest that have brief records, and no others, as many
        as there is room for: the connected ones, then those that were of interest before, then the first of
        `sets`. Whose details were dropped."""
        found = dict.fromkeys(
            node_id for nodes in sets for node_id in nodes if self._envelopes.newest_details(node_id)
        )
        ranked = [
            *(node_id for node_id in found if node_id in connected),
            *(node_id for node_id in self._held if node_id in found and node_id not in connected),
            *(node_id for node_id in found if node_id not in connected and node_id not in self._held),
        ]
        kept = dict.fromkeys(ranked[: self._nodes_max])
        dropped = [node_id for node_id in self._held if node_id not in kept]
        emptied = [node_id for node_id in dropped if self.forget(node_id)]
        for node_id in kept:
            if node_id not in self._held:
                self._held.put(node_id, HeldDetails())
        return emptied

    def forget(self, node_id: NodeId) -> bool:
        """Whether there were any."""
        held = self._held.drop(node_id)
        if held is None or held.statement is None:
            return False
        self._envelopes.complete(node_id, b"")
        return True

    def due(self, now: float) -> list[NodeId]:
        """Of whom to ask now: those first that have none here, then those that wait for longest; of those, in
        the order in which they became of interest."""
        if not self._pace.may_ask(now):
            return []
        lacking = [
            ((held.statement is not None, held.ask_at_s), node_id)
            for node_id, held in self._held.items()
            if now >= held.ask_at_s and self._lacks(node_id, held)
        ]
        return [node_id for _, node_id in sorted(lacking, key=itemgetter(0))[:DUE_MAX]]

    def question(self, node_ids: Iterable[NodeId]) -> tuple[AskedDetails, ...]:
        return tuple(
            AskedDetails(node_id, *held.version)
            for node_id in node_ids
            if (held := self._held.get(node_id)) is not None
        )

    def received(self, n_bytes: int, now: float) -> None:
        """An answer of this size."""
        self._pace.received(n_bytes, now)

    def in_vain(self, node_id: NodeId, now: float) -> None:
        """An answer did not have that node's."""
        if (held := self._held.get(node_id)) is not None:
            held.ask_at_s = now + min(RETRY_MAX_S, RETRY_S * 2.0 ** min(held.n_in_vain, 16))
            held.n_in_vain += 1

    def is_hard_to_find(self, node_id: NodeId) -> bool:
        """Nothing of it is here, and neighbours did not have it."""
        held = self._held.get(node_id)
        return held is not None and held.statement is None and held.n_in_vain >= IN_VAIN_MAX

    def take(self, sealed: bytes, asked: Collection[NodeId], now: float) -> NodeId | None:
        """Whose details they are; None: they are not news here. Raises BadMessage for forged or malformed
        ones, and where nobody asked."""
        details = unseal(sealed, Details, self._verify)
        node_id = details.node_id
        if node_id not in asked:
            raise BadMessage("details", f"nobody asked for those of {node_id}")
        try:
            decode_details(details.details)
        except UnsupportedVersion:
            raise
        except BadMessage as error:
            raise BadStatement(error.field, error.reason, node_id) from None
        held = self._held.get(node_id)
        if held is None or held.version >= (details.started_at_ms, details.number):
            return None
        if not self._complete(node_id, details):
            return None
        held.statement, held.sealed, held.n_in_vain = details, sealed, 0
        held.ask_at_s = now + max(REFRESH_S, len(sealed) / EACH_BYTES_PER_S)
        return node_id

    def envelope_came(self, node_id: NodeId) -> None:
        """A new one of that node: the details that are here go with its record, unless they are of an earlier
        life or the record is whole."""
        held = self._held.get(node_id)
        if held is None or held.statement is None:
            return
        if not self._complete(node_id, held.statement):
            held.statement, held.sealed = None, b""

    def answer(self, asked: Iterable[AskedDetails], size_max_bytes: int) -> list[bytes]:
        """What is newer here than what the asker has, as it came, as much as fits."""
        fitting: list[bytes] = []
        for each in asked:
            details, sealed = self._of(each.node_id)
            known = each.started_at_ms, each.number
            if details is None or (details.started_at_ms, details.number) <= known:
                continue
            size_max_bytes -= len(sealed)
            if size_max_bytes < 0:
                break
            fitting.append(sealed)
        return fitting

    def _of(self, node_id: NodeId) -> tuple[Details | None, bytes]:
        if node_id == self._node_id:
            return self._own or (None, b"")
        held = self._held.get(node_id)
        return (None, b"") if held is None else (held.statement, held.sealed)

    def _lacks(self, node_id: NodeId, held: HeldDetails) -> bool:
        return held.statement is None or self._envelopes.newest_details(node_id) > held.statement.number

    def _complete(self, node_id: NodeId, details: Details) -> bool:
        envelope = self._envelopes.envelope(node_id)
        if envelope is None or not envelope.details or envelope.started_at_ms != details.started_at_ms:
            return False
        try:
            whole = join_record(envelope.record, details.details)
        except ProtocolError:
            # The brief record cannot be read, or both are too large together: as bad as any other record.
            return False
        return self._envelopes.complete(node_id, whole)
