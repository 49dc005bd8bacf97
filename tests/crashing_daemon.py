"""`swarmllm` with a libp2p that falls over, as by a fault of its own, whenever the process gets SIGUSR1."""

from __future__ import annotations

import signal
from typing import Any

import trio

from swarmllm.cli.main import main
from swarmllm.swarm.libp2p.host import Host

attach = Host.attach


class Fault(Exception):
    pass


async def fail() -> None:
    raise Fault


def attach_and_listen(self: Host, libp2p_host: Any) -> None:
    attach(self, libp2p_host)
    token = trio.lowlevel.current_trio_token()
    # One of the library's main tasks, which no guard contains.
    crash = libp2p_host.get_network().manager.run_daemon_task
    signal.signal(signal.SIGUSR1, lambda *_: token.run_sync_soon(crash, fail))


if __name__ == "__main__":
    Host.attach = attach_and_listen  # type: ignore[method-assign]
    main()
