"""Asks neighbours for the details of the nodes whose models are used here, and answers those that ask.

The book decides whom to ask about, and when (details_book.py); this decides whom to ask: the node itself
where there is a connection with it, else a neighbour that is of interest itself, because it holds the same
models and so has the details of the others. A node of which nobody has any is dialled, one in a while.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Annotated, Final, Protocol

import msgspec
import trio
from msgspec import Meta

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.shared_ticks import sleep_until_tick
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.records.details_book import ASKED_MAX, AskedDetails, DetailsBook
from swarmllm.swarm.records.direct_loads import DirectLoads, NoDirectLoads
from swarmllm.swarm.records.exchange import KIND_DETAILS, Ask
from swarmllm.swarm.router import Change, UnreadableRequest
from swarmllm_proto.codec import field_and_reason
from swarmllm_proto.envelope import SEALED_DETAILS_MAX
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
DIAL_EVERY_S: Final = 10.0
ASKED_THEMSELVES_MAX: Final = 8
"""Connected nodes that are asked in one look, each for its own details."""
QUESTIONS_MAX: Final = 4
"""To neighbours in one look, for the details of others."""
ANSWER_MAX: Final = 256 * 1024
"""Bytes of details in one answer."""
_OVERHEAD: Final = 5 * (ASKED_MAX + 1)

_Asked = Annotated[tuple[AskedDetails, ...], Meta(max_length=ASKED_MAX)]
_Answered = Annotated[
    tuple[Annotated[bytes, Meta(max_length=SEALED_DETAILS_MAX)], ...], Meta(max_length=ASKED_MAX)
]
_asked: Final = msgspec.msgpack.Decoder(_Asked)
_answered: Final = msgspec.msgpack.Decoder(_Answered)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Interests = Callable[[], Iterable[Collection[NodeId]]]
"""The nodes whose details are wanted, a set for each reason, the most important first."""


class DetailsReader(Protocol):
    def blame(self, sender: NodeId, error: BadMessage) -> None:
        """For what was wrong with what it sent."""
        ...


async def no_dials(node_id: NodeId) -> None:
    """Nobody is dialled."""
    await trio.lowlevel.checkpoint()


class DetailsExchange:
    def __init__(
        self,
        book: DetailsBook,
        ask: Ask,
        connected: Collection[NodeId],
        reader: DetailsReader,
        feed: ChangeFeed,
        dial: Callable[[NodeId], Awaitable[None]] = no_dials,
        randomness: random.Random | None = None,
        loads: DirectLoads | None = None,
    ) -> None:
        """`dial`: be connected with a node in passing; raises as `Router.reach`. `randomness`: chooses among
        neighbours."""
        self._book = book
        self._ask = ask
        self._connected = connected
        self._reader = reader
        self._feed = feed
        self._dial = dial
        self._random = randomness or random.Random()
        self._dialled_at_s = -DIAL_EVERY_S
        self._loads = loads or NoDirectLoads()
        self._told = trio.Event()
        self.interests: Interests = tuple

    def told(self) -> None:
        """There are brief records."""
        self._told.set()

    async def run(self) -> None:
        """Until cancelled. Where all records are whole, this costs nothing."""
        await self._told.wait()
        while True:
            await sleep_until_tick(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Ask for what is due."""
        sets = list(self.interests())
        for node_id in self._book.want(sets, self._connected):
            self._feed.announce(Change("record", node_id))
        for node_id in self._connected:
            if node_id in self._book.of_interest:
                self._loads.ask_for_load(node_id)
        due = self._book.due(trio.current_time())
        others = [each for each in due if each not in self._connected]
        # Beside each other: one that answers nothing is waited for as long as any request.
        async with trio.open_nursery() as nursery:
            for node_id in [each for each in due if each in self._connected][:ASKED_THEMSELVES_MAX]:
                nursery.start_soon(self._ask_for, node_id, [node_id])
            for neighbour, asked in self._questions(others, sets):
                nursery.start_soon(self._ask_for, neighbour, asked)
        if (hard_to_find := next(filter(self._book.is_hard_to_find, others), None)) is not None:
            await self._dial_for(hard_to_find)

    def answer(self, body: bytes) -> bytes:
        """Raises RequestRefused."""
        try:
            asked = _asked.decode(body)
        except _UNREADABLE as error:
            field, reason = field_and_reason(error, "details")
            raise UnreadableRequest(f"{field}: {reason}") from None
        return msgspec.msgpack.encode(self._book.answer(asked, ANSWER_MAX))

    def _questions(
        self, node_ids: list[NodeId], sets: list[Collection[NodeId]]
    ) -> Iterator[tuple[NodeId, list[NodeId]]]:
        """(whom to ask, about which nodes). Of each set a neighbour that is in it, which has the details of
        the others where it uses the model for which it is of interest here; else another one of interest."""
        connected = list(self._connected)
        likely = [node_id for node_id in connected if node_id in self._book.of_interest]
        left, n_left = dict.fromkeys(node_ids), QUESTIONS_MAX
        for nodes in sets:
            asked = [node_id for node_id in left if node_id in nodes]
            holders = [node_id for node_id in likely if node_id in nodes]
            for start in range(0, len(asked), ASKED_MAX):
                if not connected or not n_left:
                    return
                n_left -= 1
                yield self._random.choice(holders or likely or connected), asked[start : start + ASKED_MAX]
            for node_id in asked:
                del left[node_id]

    async def _dial_for(self, node_id: NodeId) -> None:
        if trio.current_time() < self._dialled_at_s + DIAL_EVERY_S:
            return
        self._dialled_at_s = trio.current_time()
        try:
            await self._dial(node_id)
        except SwarmLLMError as error:
            provoked_by(log, node_id).debug("node %s, for its details: %s", node_id, error)
        else:
            await self._ask_for(node_id, [node_id])

    async def _ask_for(self, source: NodeId, node_ids: list[NodeId]) -> None:
        body = msgspec.msgpack.encode(self._book.question(node_ids))
        came: set[NodeId] = set()
        try:
            answered = await self._ask(source, KIND_DETAILS, body)
        except SwarmLLMError as error:
            provoked_by(log, source).debug("details from node %s: %s", source, error)
        else:
            self._book.received(len(answered), trio.current_time())
            for sealed in self._read(source, answered):
                if (node_id := self._take(source, sealed, node_ids)) is not None:
                    came.add(node_id)
                # Checking and decoding the largest takes a millisecond, and there may be dozens.
                await trio.lowlevel.checkpoint()
        for node_id in node_ids:
            if node_id not in came:
                self._book.in_vain(node_id, trio.current_time())

    def _read(self, source: NodeId, answered: bytes) -> tuple[bytes, ...]:
        try:
            if len(answered) > ANSWER_MAX + _OVERHEAD:
                raise BadMessage("details", f"{len(answered)} bytes, at most {ANSWER_MAX}")
            return _answered.decode(answered)
        except _UNREADABLE as error:
            self._reader.blame(source, BadMessage(*field_and_reason(error, "details")))
        except BadMessage as error:
            self._reader.blame(source, error)
        return ()

    def _take(self, source: NodeId, sealed: bytes, asked: list[NodeId]) -> NodeId | None:
        try:
            node_id = self._book.take(sealed, asked, trio.current_time())
        except BadMessage as error:
            provoked_by(log, source).debug("node %s passed on bad details: %s", source, error)
            self._reader.blame(source, error)
            return None
        if node_id is not None:
            self._feed.announce(Change("record", node_id))
        return node_id
