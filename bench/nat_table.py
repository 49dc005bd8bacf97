"""Who reaches whom, and how, behind the usual kinds of NAT: a table of all pairs.

    sudo python -m bench.nat_table [--kinds open port-restricted symmetric] [--out FILE]

Two homes of each kind in network namespaces of their own (`bench.common.nat_networks`), one node in each,
and one node on the open internet that is their bootstrap node and relay. All of them are one swarm. The first
node of each kind reaches the second one of every kind, as for a request that is to go there. When the way has
settled, it sends a request and a message that has to come back. The rival of each way is the better one: a
direct connection is better than a hole, and a hole better than a relay. `--at-once 3` has so many kinds in
one swarm, one swarm after the other, for machines that two dozen nodes at once are too many for.

Needs root, `ip` and `nft`, and miniupnpd for the kinds whose router forwards ports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import trio

from bench.common.figures import machine
from bench.common.namespaces import NoNamespaces, inside
from bench.common.nat_networks import KINDS, Kind, can_map_ports, homes, kind_named
from swarmllm.errors import SwarmLLMError
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.router import PortMappingState
from swarmllm.swarm.settings import RelayLimits, SwarmSettings
from swarmllm_proto.identifiers import NodeId

COMMAND = "python -m bench.nat_table"
READY_S = 120.0
REACH_S = 40.0
PUNCH_S = 30.0
"""A hole for libp2p is tried three times, a few seconds apart; one for the data port once, and again after a
minute."""
UPGRADE_S = 40.0
"""For a data connection over the data port, where one of the two can be dialled: a better way is looked for
every 30 s."""
TRY_S = 20.0
PAYLOAD = bytes(14 * 1024)


@dataclass(frozen=True)
class Way:
    """From one node to another."""

    control: str
    """Of libp2p's connection: direct, hole, relay, none."""
    data: str
    """Of the data connection: direct (over the data port), hole, stream, relay, none."""
    answers: bool
    """A request was answered, and a message came back."""

    def __str__(self) -> str:
        if self.control == "none":
            return "none"
        said = self.control if self.control == self.data else f"{self.control}, {self.data}"
        return said if self.answers else f"{said} (no answer)"


async def run_node(folder: Path, bootstrap: Sequence[str], maps_ports: bool, questions: Connection) -> None:
    """Answers questions until they end. Each is a node to reach and for how long to wait for a better way, or
    none: the state of this node is asked for."""
    settings = SwarmSettings(
        folder,
        bootstrap=tuple(bootstrap),
        # Nobody dials anybody unasked: two dozen nodes that all look for each other are busy for minutes.
        max_peers=1 if bootstrap else 64,
        mdns=False,
        # Elsewhere no router answers, which two dozen processes would find out.
        port_mapping=maps_ports,
        relay_service=not bootstrap,
        relay_limits=RelayLimits(reservations=128, circuits=1024),
    )
    echoed: dict[str, trio.Event] = {}

    async def take(sender: NodeId, header: bytes, payload: memoryview) -> None:
        if header == b"there":
            nursery.start_soon(router.send, sender, b"back", bytes(payload))
        elif sender in echoed:
            echoed[sender].set()

    async def answer(sender: NodeId, body: bytes) -> bytes:
        return body

    async def answers(node_id: NodeId) -> bool:
        echoed[node_id] = trio.Event()
        with trio.move_on_after(TRY_S):
            try:
                await router.request(node_id, b"ping")
                await router.send(node_id, b"there", PAYLOAD)
                await echoed[node_id].wait()
            except SwarmLLMError:
                return False
            return True
        return False

    async with open_libp2p_router(settings) as router, trio.open_nursery() as nursery:
        router.serve(answer, take)
        await router.publish(b"a record")
        questions.send((router.node_id, router.addresses))
        with suppress(EOFError):
            while True:
                asked: NodeId | None
                asked, punch_s, upgrade_s = await trio.to_thread.run_sync(questions.recv)
                if asked is None:
                    questions.send(state(router))
                    continue
                await settle(router, asked, punch_s, upgrade_s)
                is_answered = await answers(asked)
                questions.send(Seen(*way(router, asked), is_answered))
        nursery.cancel_scope.cancel()


@dataclass(frozen=True)
class State:
    n_known: int
    """Nodes of which this one has the record."""
    is_dialled: bool
    """A peer has dialled it and got through."""
    is_ready: bool
    """It was dialled, or has a relay to be reached through, and its router has done what it will do."""
    port_mapping: PortMappingState


@dataclass(frozen=True)
class Seen:
    """From a node that was asked to reach another."""

    is_direct: bool | None
    """No relay carries the connection; None: there is none."""
    data: str
    answers: bool


def state(router: Libp2pRouter) -> State:
    found = router.reachability
    is_dialled = found is not None and any(reached for _, reached in found.control)
    mapping = router.port_mapping
    is_ready = is_dialled or (mapping.state in ("off", "failed") and bool(router.wide_area.relaying.relays))
    return State(len(router.records()), is_dialled, is_ready, mapping)


def way(router: Libp2pRouter, node_id: NodeId) -> tuple[bool | None, str]:
    is_direct = router.host.is_direct(node_id) if node_id in router.connected() else None
    return is_direct, router.plane.status(node_id).kind


async def settle(router: Libp2pRouter, node_id: NodeId, punch_s: float, upgrade_s: float) -> None:
    """Reach it, and wait for a better way than a relay."""
    with trio.move_on_after(REACH_S):
        is_reached = False
        # Also a node that is connected: then there is a data connection, as before a request.
        while not is_reached or node_id not in router.connected():
            try:
                await router.reach(node_id, timeout_s=REACH_S)
                is_reached = True
                await trio.sleep(0.1)  # records are exchanged behind it
            except SwarmLLMError:
                await trio.sleep(1.0)
    with trio.move_on_after(max(punch_s, upgrade_s)):
        while way(router, node_id) != (True, "direct"):  # noqa: ASYNC110
            await trio.sleep(0.2)


def run_in(
    namespace: str, folder: Path, bootstrap: Sequence[str], maps_ports: bool, questions: Connection
) -> None:
    """In a process of its own. Other processes' pipes are closed, so that each sees when the parent ends."""
    os.closerange(questions.fileno() + 1, 1024)
    os.closerange(3, questions.fileno())
    # Whatever is opened from here on is of the namespace, also in threads.
    with inside(namespace):
        folder.mkdir()
        trio.run(run_node, folder, bootstrap, maps_ports, questions)


class Node:
    """A process that has read all modules already: two dozen would be busy with that for minutes."""

    def __init__(
        self,
        namespace: str,
        folder: Path,
        bootstrap: Sequence[str],
        stack: ExitStack,
        *,
        maps_ports: bool = False,
    ) -> None:
        self._questions, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        process = fork.Process(
            target=run_in, args=(namespace, folder, bootstrap, maps_ports, theirs), daemon=True
        )
        process.start()
        self._process = process
        stack.callback(process.join)
        stack.callback(process.kill)
        theirs.close()
        self.node_id, self.addresses = self._questions.recv()

    def ask(self, node_id: NodeId, punch_s: float, upgrade_s: float) -> None:
        """To reach that node."""
        self._questions.send((node_id, punch_s, upgrade_s))

    def stop(self) -> None:
        """In good order."""
        self._questions.close()
        self._process.join()

    def state(self) -> State:
        self._questions.send((None, 0.0, 0.0))
        found: State = self._questions.recv()
        return found

    def seen(self) -> Seen:
        found: Seen = self._questions.recv()
        return found


def groups_of(kinds: Sequence[Kind], size: int) -> list[list[Kind]]:
    """So that each kind is in some group with each other one: a machine can run so many nodes at once, and
    starved ones take each other for dead."""
    left = set(itertools.combinations(range(len(kinds)), 2))
    found: list[list[Kind]] = []

    def n_new(group: tuple[int, ...]) -> int:
        return len(left.intersection(itertools.combinations(group, 2)))

    while left or not found:
        group = max(itertools.combinations(range(len(kinds)), min(size, len(kinds))), key=n_new)
        left.difference_update(itertools.combinations(group, 2))
        found.append([kinds[i] for i in group])
    return found


Ways = dict[tuple[str, str], Way]
"""By the names of two kinds: from a node of the first to one of the second."""


def ways_between(
    kinds: Sequence[Kind], ready_s: float = READY_S, punch_s: float = PUNCH_S, upgrade_s: float = UPGRADE_S
) -> Ways:
    """From the first node of each kind to the second of each. Raises NoNamespaces."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        namespaces, folder = stack.enter_context(homes([*kinds, *kinds])), Path(name)
        meeting = Node(namespaces[-1], folder / "meeting", (), stack)
        where = [text for text in meeting.addresses if "127.0.0.1" not in text]
        nodes = [
            Node(namespace, folder / str(number), where, stack, maps_ports=kind.maps_ports)
            for number, (namespace, kind) in enumerate(zip(namespaces[:-1], [*kinds, *kinds], strict=True))
        ]
        states = until_ready(nodes, ready_s)
        n_kinds = len(kinds)
        found: Ways = {}
        for turn in range(n_kinds):
            # In each turn every node has one other to reach.
            pairs = [(first, (first + turn) % n_kinds) for first in range(n_kinds)]
            dialled = [states[a].is_dialled or states[n_kinds + b].is_dialled for a, b in pairs]
            for (first, second), is_dialled in zip(pairs, dialled, strict=True):
                nodes[first].ask(nodes[n_kinds + second].node_id, punch_s, upgrade_s if is_dialled else 0.0)
            for (first, second), is_dialled in zip(pairs, dialled, strict=True):
                names = kinds[first].name, kinds[second].name
                found[names] = named(nodes[first].seen(), is_dialled=is_dialled)
                print(f"{' to '.join(names)}: {found[names]}", file=sys.stderr, flush=True)
        return found


def until_ready(nodes: Sequence[Node], ready_s: float) -> list[State]:
    """All have heard of all, and can be reached somehow, as far as that will be."""
    deadline_s = time.monotonic() + ready_s
    while True:
        states = [node.state() for node in nodes]
        if all(each.n_known > len(nodes) and each.is_ready for each in states):
            return states
        if time.monotonic() > deadline_s:
            n_known = min(each.n_known for each in states)
            n_ready = sum(each.is_ready for each in states)
            print(f"{n_ready} of {len(nodes)} ready, the least known {n_known}", file=sys.stderr)
            return states
        time.sleep(1.0)


def named(seen: Seen, *, is_dialled: bool) -> Way:
    if seen.is_direct is None:
        return Way("none", "none", seen.answers)
    control = ("direct" if is_dialled else "hole") if seen.is_direct else "relay"
    data = {"direct": "direct" if is_dialled else "hole", "libp2p": "stream"}.get(seen.data, seen.data)
    return Way(control, data, seen.answers)


def table(kinds: Sequence[Kind], ways: Ways) -> str:
    lines = [f"| | {' | '.join(kind.name for kind in kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for kind in kinds:
        row = [str(ways[kind.name, other.name]) for other in kinds]
        lines.append(f"| {kind.name} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usable = [kind for kind in KINDS if can_map_ports() or not kind.maps_ports]
    parser.add_argument("--kinds", nargs="+", default=[kind.name for kind in usable])
    parser.add_argument("--at-once", type=int, default=len(usable), help="kinds in one swarm")
    parser.add_argument("--ready-s", type=float, default=READY_S)
    parser.add_argument("--punch-s", type=float, default=PUNCH_S, help="to wait for a hole")
    parser.add_argument("--upgrade-s", type=float, default=UPGRADE_S, help="to wait for the data port")
    parser.add_argument("--out", type=Path, help="other kinds that are in the file stay in it")
    arguments = parser.parse_args()
    kinds = [kind_named(name) for name in arguments.kinds]
    ways: Ways = {}
    try:
        for group in groups_of(kinds, arguments.at_once):
            # What was found before stands.
            ways = ways_between(group, arguments.ready_s, arguments.punch_s, arguments.upgrade_s) | ways
    except NoNamespaces as error:
        raise SystemExit(f"no network namespaces with nftables here: {error}") from None
    print(table(kinds, ways))
    if arguments.out:
        rows = [{"from": a, "to": b} | asdict(way) for (a, b), way in ways.items()]
        if arguments.out.exists():
            others = json.loads(arguments.out.read_text())["ways"]
            rows += [row for row in others if (row["from"], row["to"]) not in ways]
        document = {"command": COMMAND, "machine": machine(), "ways": rows}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
