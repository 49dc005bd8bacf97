"""Tells this node's load: to those that use it on their data connections, each change of it; to everybody by
heartbeats, in a large swarm only what lasts (sustained_load.py).

In a small swarm `spread` has each change go round by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio

from swarmllm.swarm.records.direct_loads import DirectLoads
from swarmllm.swarm.records.sustained_load import SustainedLoad
from swarmllm_proto.codec import decode_record
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.node_load import NodeLoad, decode_load, encode_load, load_of

log = logging.getLogger(__name__)


class LoadPublisher:
    def __init__(self, direct: DirectLoads) -> None:
        self._direct = direct
        self._sustained = SustainedLoad()
        self._recorded = NodeLoad()
        """As the newest brief record says."""
        self._told = b""
        """By heartbeats since; empty: nothing."""
        self._noted = trio.Event()

    def __repr__(self) -> str:
        return f"<LoadPublisher {self._sustained}>"

    def in_record(self, record: bytes) -> None:
        """The load of now is in a record that is about to be published."""
        try:
            self._note(load_of(decode_record(record).capability))
        except ProtocolError as error:
            log.debug("this node's own record cannot be read: %s", error)

    def changed(self, load: bytes) -> None:
        try:
            self._note(decode_load(load))
        except ProtocolError as error:
            log.debug("this node's own load cannot be read: %s", error)

    def _note(self, load: NodeLoad) -> None:
        self._sustained.note(load, trio.current_time())
        self._noted.set()
        self._direct.tell_load(encode_load(load))

    def sustained(self) -> NodeLoad:
        """What a brief record is to say."""
        return self._sustained.at(trio.current_time())

    def recorded(self, load: NodeLoad) -> None:
        """One is published that says so."""
        self._recorded, self._told = load, b""
        self._sustained.told(load)
        self._noted.set()

    def for_heartbeat(self) -> bytes:
        """What a heartbeat is to say that is sent now, in a large swarm; empty: as the record says."""
        load = self._sustained.at(trio.current_time())
        if self._told or load != self._recorded:
            self._told = encode_load(load)
        self._sustained.told(load)
        return self._told

    async def run(
        self, is_large: Callable[[], bool], n_nodes: Callable[[], int], tell: Callable[[], Awaitable[None]]
    ) -> NoReturn:
        """`tell`: send a heartbeat now. `n_nodes`: that are known."""
        while True:
            self._noted = trio.Event()
            now, look_at_s = trio.current_time(), float("inf")
            if is_large():
                if self._sustained.is_due(now, n_nodes()):
                    await tell()
                look_at_s = self._sustained.look_at_s(now, n_nodes())
            with trio.move_on_at(look_at_s):
                await self._noted.wait()
