"""Hypercorn's connections, without the half minute that each stays open after its client has closed it.

Hypercorn (0.17 to 0.18) waits in one task group for the reader of a connection and for its idle timer, and
nothing stops the timer when the reader comes to the end: a client that asks once and closes leaves a file
descriptor and two tasks behind until the keep-alive time is over.
"""

from __future__ import annotations

from typing import Any

from hypercorn.events import Event, Updated
from hypercorn.trio import run
from hypercorn.trio.tcp_server import TCPServer


class PromptlyClosed(TCPServer):
    _is_at_end = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._is_at_end = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and self._is_at_end:
            return
        await super().protocol_send(event)


def install() -> None:
    """Hypercorn makes its connections of this kind from here on."""
    module: Any = run
    assert issubclass(module.TCPServer, TCPServer)
    module.TCPServer = PromptlyClosed
