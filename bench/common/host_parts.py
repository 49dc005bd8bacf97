"""Many libp2p hosts in a few processes, and what each of them knows of all others.

A process (a *part*) runs some hosts, each with the router of the product and a folder of its own. The parts
are forked from a process that has imported everything, so that one more costs no second of imports. A
benchmark tells them what to do, one command after the other, and ends one as a kill does (SIGKILL).

Each host asks and answers requests, and counts the messages that it sends and receives: they are numbered, so
one that is missing is noticed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import random
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from bench.bootstrap_node import record_of, resident_mib
from bench.common.namespaces import inside
from swarmllm.errors import SwarmLLMError
from swarmllm.swarm.discovery.dialler import PEERS_MAX
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.records import spread
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.record_parts import split_record

if TYPE_CHECKING:
    from trio_typing import TaskStatus

SEND_EVERY_S = 1.0
N_LISTENERS = 2
"""To so many others each host sends."""
ANSWER_S = 60.0
GC_HOSTS = 50
"""The collector looks as often as that of one daemon would: it looks at the hosts of a part together."""


@dataclass(frozen=True)
class HostPlan:
    name: str
    folder: Path
    listen_host: str
    bootstrap: tuple[str, ...] = ()
    max_peers: int = PEERS_MAX


@dataclass(frozen=True)
class Known:
    """What others may know of a host."""

    node_id: NodeId
    addresses: tuple[str, ...]
    record: bytes


@dataclass(frozen=True)
class Look:
    """At the hosts of one part, or of all."""

    n_lacking: int = 0
    """Pairs of which the one does not reach the other, or has not its latest record."""
    n_dead: int = 0
    """Pairs of which the one counts the other as reachable, which does not run."""
    degrees: tuple[int, ...] = ()
    n_records_max: int = 0
    processor_s: float = 0.0
    resident_mib: float = 0.0
    n_tasks: int = 0
    n_files: int = 0

    def __add__(self, other: Look) -> Look:
        return Look(
            self.n_lacking + other.n_lacking,
            self.n_dead + other.n_dead,
            self.degrees + other.degrees,
            max(self.n_records_max, other.n_records_max),
            self.processor_s + other.processor_s,
            self.resident_mib + other.resident_mib,
            self.n_tasks + other.n_tasks,
            self.n_files + other.n_files,
        )


@dataclass
class Messages:
    """Of one part's hosts."""

    sent: Counter[tuple[NodeId, NodeId]] = field(default_factory=Counter)
    received: Counter[tuple[NodeId, NodeId]] = field(default_factory=Counter)
    n_missed: int = 0
    """Numbers that were left out."""
    n_refused: int = 0
    """Sends that raised an error."""


class Part:
    """What runs in one process. Its public methods are the commands."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._routers: dict[str, Libp2pRouter] = {}
        self._scopes: dict[str, trio.CancelScope] = {}
        self._expected: dict[NodeId, bytes] = {}
        self._messages = Messages()
        self._sending: trio.CancelScope | None = None

    async def start(self, plans: Sequence[HostPlan]) -> dict[str, Known]:
        """Returns when all of them listen."""
        known: dict[str, Known] = {}

        async def start_one(plan: HostPlan) -> None:
            known[plan.name] = await self._nursery.start(self._run, plan)

        async with trio.open_nursery() as nursery:
            for plan in plans:
                nursery.start_soon(start_one, plan)
        return known

    async def _run(self, plan: HostPlan, *, task_status: TaskStatus[Known]) -> None:
        settings = SwarmSettings(
            plan.folder,
            plan.listen_host,
            0,
            0,
            bootstrap=plan.bootstrap,
            max_peers=plan.max_peers,
            mdns=False,
        )
        plan.folder.mkdir(parents=True, exist_ok=True)
        with trio.CancelScope() as scope:
            async with open_libp2p_router(settings) as router:
                router.serve(self._answer, partial(self._receive, router.node_id))
                record = record_of(router.node_id)
                await router.publish(record)
                self._routers[plan.name], self._scopes[plan.name] = router, scope
                task_status.started(Known(router.node_id, tuple(router.addresses), record))
                await trio.sleep_forever()
        del self._routers[plan.name], self._scopes[plan.name]

    async def stop(self, names: Collection[str]) -> None:
        """They say goodbye."""
        for name in names:
            self._scopes[name].cancel()
        while not self._routers.keys().isdisjoint(names):  # noqa: ASYNC110
            await trio.sleep(0.01)

    async def expect(self, records: dict[NodeId, bytes]) -> None:
        """These nodes run, and this is what they have said last."""
        self._expected = records

    async def look(self) -> Look:
        n_lacking = n_dead = 0
        for router in self._routers.values():
            reachable, records = router.reachable(), router.records()
            n_dead += len(reachable - self._expected.keys())
            n_lacking += sum(
                node_id != router.node_id
                and (node_id not in reachable or not _says(records.get(node_id), record))
                for node_id, record in self._expected.items()
            )
        return Look(
            n_lacking,
            n_dead,
            tuple(len(router.connected()) for router in self._routers.values()),
            max((len(router.records()) for router in self._routers.values()), default=0),
            time.process_time(),
            resident_mib("self"),
            trio.lowlevel.current_statistics().tasks_living,
            _n_open_files(),
        )

    async def publish(self, name: str, speech: str) -> bytes:
        router = self._routers[name]
        record = record_of(router.node_id, speech)
        await router.publish(record)
        return record

    async def knows(self, name: str) -> set[NodeId]:
        """Whom that host reaches, with their latest records."""
        reachable, records = self._routers[name].reachable(), self._routers[name].records()
        return {
            node_id
            for node_id, record in self._expected.items()
            if node_id in reachable and _says(records.get(node_id), record)
        }

    async def connected(self, name: str) -> frozenset[NodeId]:
        return self._routers[name].connected()

    async def reaching(self, node_id: NodeId) -> dict[str, bool]:
        """Which hosts count that node as reachable, and whether they are connected with it."""
        return {
            name: node_id in router.connected()
            for name, router in self._routers.items()
            if node_id in router.reachable()
        }

    async def ask(self, name: str, node_id: NodeId) -> float | None:
        """Seconds until that node, connected or not, has answered that host; None where it did not."""
        began_s = time.perf_counter()
        try:
            await self._routers[name].request(node_id, b"?")
        except SwarmLLMError:
            return None
        return time.perf_counter() - began_s

    async def _answer(self, sender: NodeId, body: bytes) -> bytes:
        return body

    async def _receive(self, own: NodeId, sender: NodeId, header: bytes, payload: memoryview) -> None:
        number, expected = int(header), self._messages.received[sender, own]
        self._messages.n_missed += number != expected
        self._messages.received[sender, own] = number + 1

    async def send(self, listeners: Mapping[str, Sequence[NodeId]]) -> None:
        """From now on each of these hosts sends to those nodes."""
        self._sending = trio.CancelScope()
        for name, node_ids in listeners.items():
            for node_id in node_ids:
                self._nursery.start_soon(self._keep_sending, self._sending, self._routers[name], node_id)

    async def _keep_sending(self, scope: trio.CancelScope, router: Libp2pRouter, node_id: NodeId) -> None:
        pair = (router.node_id, node_id)
        while not scope.cancel_called:
            try:
                await router.send(node_id, b"%d" % self._messages.sent[pair], b"x" * 4096)
                self._messages.sent[pair] += 1
            except SwarmLLMError:
                self._messages.n_refused += 1
            await trio.sleep(SEND_EVERY_S * random.uniform(0.5, 1.5))

    async def beat_every(self, interval_s: float) -> None:
        """From now on these hosts send heartbeats as in a swarm that is quiet and as large as makes that the
        interval."""
        spread.HEARTBEAT_MAX_S = interval_s

    async def end_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    async def messages(self) -> Messages:
        return self._messages

    async def n_bytes_received(self) -> int:
        """By all interfaces of this part's namespace, with headers and acknowledgements."""
        return _n_bytes_received()


def _n_bytes_received() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


def _says(heard: bytes | None, record: bytes) -> bool:
    """Whether that is the record, or a brief one of it, as it travels among many."""
    return heard == record or heard == _brief(record)


@lru_cache(maxsize=1024)
def _brief(record: bytes) -> bytes:
    return split_record(record)[0]


def _n_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def _obey(commands: Connection) -> None:
    async with trio.open_nursery() as nursery:
        part = Part(nursery)
        while True:
            try:
                name, *arguments = await trio.to_thread.run_sync(commands.recv)
            except EOFError:
                break
            command: Callable[..., Awaitable[Any]] = getattr(part, name)
            commands.send(await command(*arguments))
        nursery.cancel_scope.cancel()


def _run_part(commands: Connection, namespace: str | None, clock_wrong_s: float) -> None:
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()  # as the daemon does
    gc.set_threshold(700 * GC_HOSTS, 10, 10)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    right_ns = time.time_ns
    time.time_ns = lambda: right_ns() + round(clock_wrong_s * 1e9)
    if namespace is None:
        trio.run(_obey, commands)
        return
    with inside(namespace):
        trio.run(_obey, commands)


class PartProcess:
    """One part, from outside."""

    def __init__(
        self, context: ForkServerContext, listen_host: str, namespace: str | None, clock_wrong_s: float
    ) -> None:
        self.listen_host = listen_host
        self.namespace = namespace
        self._commands, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_run_part, args=(theirs, namespace, clock_wrong_s), daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self, command: str, *arguments: Any) -> None:
        self._commands.send((command, *arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        if not self._commands.poll(timeout_s):
            raise TimeoutError("a part of the swarm does not answer")
        return self._commands.recv()

    def do(self, command: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        self.tell(command, *arguments)
        return self.answer(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._commands.close()


MakePart = Callable[[str, str | None, float], PartProcess]
"""(IP to listen on, namespace or None, seconds by which its clock is fast)"""


@contextmanager
def part_processes() -> Iterator[MakePart]:
    """Makes parts, which end with the context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    made: list[PartProcess] = []

    def make(listen_host: str, namespace: str | None, clock_wrong_s: float) -> PartProcess:
        made.append(PartProcess(context, listen_host, namespace, clock_wrong_s))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            if each.process.is_alive():
                each.kill()
