"""Takes accepted connections through their handshakes a few at a time, in the order in which they began.

Two hundred nodes may start at once and know one address. If all their handshakes were under way at the same
time, none would be over before its dialler gave up, and all would come again. So a few have a turn, the
others wait, and one that has waited for so long that its dialler is about to give up is closed: what is begun
gets done. A peer that sends nothing has no turn, and one that falls silent in its turn keeps it for TURN_S.

The next turn is for the network that has fewest. Where too many wait, a silent one makes room, else one that
is drawn by lot among those without a turn, in the network that has most of them. So who opens many
connections and sends a little on each holds up its own network, and nobody else's for longer than TURN_S.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from swarmllm.swarm.peers.connection_limits import network_of

HALF_OPEN_MAX: Final = 64
"""Inbound connections in the middle of their handshakes, unless more are asked for."""
TURNS: Final = 32
"""Of some ms of the processor each, on either end; but a handshake is three messages, and where a hundred
nodes share a processor each of them may wait for a second."""
TURN_S: Final = 2.0
SPEAKS_S: Final = 10.0
STALE_S: Final = 15.0


class Handshake:
    """One of them, until `end`."""

    def __init__(self, turns: HandshakeTurns, stream: trio.SocketStream, network: str) -> None:
        self._turns = turns
        self.stream = stream
        self.network = network
        self.has_sent = False
        self.turn_at_s: float | None = None
        self.woken = trio.Event()

    def end(self) -> None:
        """Idempotent."""
        self._turns.end(self)


class HandshakeTurns:
    def __init__(
        self,
        speaks: Callable[[trio.SocketStream], Awaitable[None]] | None = None,
        randomness: random.Random | None = None,
        *,
        network: Callable[[trio.SocketStream], str] | None = None,
        half_open_max: int = HALF_OPEN_MAX,
        stale_s: float = STALE_S,
    ) -> None:
        """`speaks` returns when something has come. `network`: of the other end. `stale_s`: half of what a
        dialler waits."""
        self._speaks = speaks or _readable
        self._network = network or _network
        self._random = randomness or random.Random()
        self._half_open_max = half_open_max
        self._stale_s = stale_s
        self._all: dict[Handshake, None] = {}
        """In the order in which they came; of those that wait for a turn, in which they sent something."""

    def __repr__(self) -> str:
        n_turns = sum(each.turn_at_s is not None for each in self._all)
        return f"<HandshakeTurns {len(self._all)} half open, {n_turns} with a turn>"

    async def begin(self, stream: trio.SocketStream) -> Handshake | None:
        """Returns when it has its turn; None where it was closed instead."""
        mine = Handshake(self, stream, self._network(stream))
        if len(self._all) >= self._half_open_max and not await self._make_room(mine):
            return None
        self._all[mine] = None
        began = False
        try:
            with trio.move_on_after(SPEAKS_S):
                await self._speaks(stream)
                mine.has_sent = True
            if mine.has_sent and mine in self._all:
                self._all[mine] = self._all.pop(mine)
                began = await self._has_turn(mine)
        except (OSError, trio.ClosedResourceError, trio.BusyResourceError):
            pass
        finally:
            if not began:
                self.end(mine)
        if not began:
            await trio.aclose_forcefully(stream)
        return mine if began else None

    def end(self, handshake: Handshake) -> None:
        if handshake in self._all:
            del self._all[handshake]
            self._wake_first()

    async def _has_turn(self, mine: Handshake) -> bool:
        stale_at_s = trio.current_time() + self._stale_s
        while mine in self._all:
            now = trio.current_time()
            free_at_s = self._free_at_s(now)
            first = self._first(now)
            if first is mine and free_at_s <= now:
                mine.turn_at_s = now
                self._wake_first()
                return True
            if now >= stale_at_s:
                return False
            if first is not None and free_at_s <= now:
                first.woken.set()  # turns that are over have changed whose the next one is
            mine.woken = trio.Event()
            with trio.move_on_at(min(stale_at_s, free_at_s if first is mine else stale_at_s)):
                await mine.woken.wait()
        return False

    def _free_at_s(self, now: float) -> float:
        """When there is a turn, unless one ends sooner."""
        ends_s = sorted(each.turn_at_s + TURN_S for each in self._all if each.turn_at_s is not None)
        under_way = [end_s for end_s in ends_s if end_s > now]
        return now if len(under_way) < TURNS else under_way[len(under_way) - TURNS]

    def _first(self, now: float) -> Handshake | None:
        """Whose turn is next."""
        turns = [each for each in self._all if each.turn_at_s is not None and each.turn_at_s + TURN_S > now]
        n_turns = Counter(each.network for each in turns)
        waiting = [each for each in self._all if each.has_sent and each.turn_at_s is None]
        return min(waiting, key=lambda each: n_turns[each.network], default=None)

    def _wake_first(self) -> None:
        if (first := self._first(trio.current_time())) is not None:
            first.woken.set()

    async def _make_room(self, newcomer: Handshake) -> bool:
        """False: the newcomer gives way itself."""
        silent = next((each for each in self._all if not each.has_sent), None)
        waiting = [each for each in self._all if each.turn_at_s is None]
        overdue = [each for each in self._all if each.turn_at_s is not None]
        leaving = silent or (self._drawn([*waiting, newcomer]) if waiting else overdue[0])
        if leaving is not newcomer:
            self.end(leaving)
            leaving.woken.set()
        await trio.aclose_forcefully(leaving.stream)
        return leaving is not newcomer

    def _drawn(self, waiting: Sequence[Handshake]) -> Handshake:
        """One of the network that has most of them."""
        n_waiting = Counter(each.network for each in waiting)
        most = max(n_waiting.values())
        return self._random.choice([each for each in waiting if n_waiting[each.network] == most])


def _network(stream: trio.SocketStream) -> str:
    try:
        return network_of(str(stream.socket.getpeername()[0]))
    except OSError:
        return ""  # it has gone


async def _readable(stream: trio.SocketStream) -> None:
    await trio.lowlevel.wait_readable(stream.socket.fileno())
