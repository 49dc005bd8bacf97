"""How long one step of a node's event loop takes while others announce all that they may.

    python -m bench.loop_steps --seconds 20

One node in this process: record book, registry, worker with the bundled model, HTTP. Envelopes signed by
other identities are handed to it as gossip hands them over, one task for all peers. Another process reads
/api/events, as an open dashboard does, and sends chat requests. All steps of trio's loop are timed: a step is
what a task does between two checkpoints, and no other task runs meanwhile. Times are processor time of the
loop's thread; the longest by the clock says more about the machine where that is busy. Scenarios:

quiet     nobody else is there
liars     32 peers, each with 256 models of 1,000 layers of which it holds 8 ranges (as many as one record may
          have), other ones every second
honest    256 peers that hold the same 20 models, and tell their load every 5 s
one model 256 peers that claim 60 ranges each of the model that is asked for, other ones every 10 s
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trio
import trio.lowlevel
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from bench.common.figures import machine
from swarmllm.api.http.endpoint import open_api
from swarmllm.config import ApiTable, Config, InferenceTable
from swarmllm.downloads import SharedDigests
from swarmllm.errors import NodeUnreachable
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import Catalogue, Store
from swarmllm.node import Node
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.libp2p.gossip import MODELS
from swarmllm.swarm.membership.identity import Identity, verify
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.records.spread import RecordSpread
from swarmllm.swarm.router import Change, PeerInfo
from swarmllm.transfer import ModelTransfer, TransferSettings
from swarmllm.workerpool import WorkerPool
from swarmllm.workerpool.settings import WorkerSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.envelope import Envelope, seal
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import (
    RECORD_MODELS_MAX,
    RECORD_RANGES_MAX,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    ShardAnnounce,
)

COLUMNS = (
    "scenario", "peers", "steps", "p50 ms", "p99 ms", "p99.9 ms", "longest ms", "whose",
    "by the clock ms", "chats", "chat s",
)  # fmt: skip
N_HONEST, N_LIARS, N_ON_ONE = 256, 32, 256
Make = Callable[[str, int], NodeRecord]
"""(node id, round) -> what it announces then."""


@dataclass(eq=False)
class Steps(trio.abc.Instrument):
    """The processor time of every step, by task what the longest were, and the longest by the clock."""

    took_s: list[float] = field(default_factory=list)
    longest_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    longest_by_clock_s: float = 0.0
    began_s: tuple[float, float] = (0.0, 0.0)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.began_s = time.perf_counter(), time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        began_s, began_cpu_s = self.began_s
        if began_s:
            took_s = time.thread_time() - began_cpu_s
            self.took_s.append(took_s)
            self.longest_s[task.name] = max(self.longest_s[task.name], took_s)
            self.longest_by_clock_s = max(self.longest_by_clock_s, time.perf_counter() - began_s)


class HeardRouter:
    """A router whose peers are only heard."""

    addresses: tuple[str, ...] = ()
    reachability = None

    def __init__(self, identity: Identity, nursery: trio.Nursery) -> None:
        self.node_id = identity.node_id
        self.feed = ChangeFeed()
        self._connected: set[str] = set()
        self.spread = RecordSpread(
            identity,
            verify,
            1,
            nursery,
            self.feed,
            ask=self.request,
            connected=self._connected,
            listener=self,
        )

    def heard(self, envelope: Envelope) -> None: ...

    def forgotten(self, node_id: NodeId) -> None: ...

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return False

    def records(self) -> Mapping[str, bytes]:
        return self.spread.records

    async def publish(self, record: bytes) -> None:
        await self.spread.publish(record)

    async def publish_details(self, record: bytes, *, soon: bool) -> bool:
        return await self.spread.publish_details(record, soon=soon)

    def loads(self) -> Mapping[str, bytes]:
        return self.spread.loads()

    async def publish_load(self, load: bytes) -> None:
        await self.spread.publish_load(load)

    def connected(self) -> frozenset[str]:
        return frozenset(self._connected)

    def reachable(self) -> frozenset[str]:
        return self.connected()

    def untried(self) -> frozenset[str]:
        return frozenset()

    async def reach(self, node_id: str, *, timeout_s: float = 5.0) -> None:
        if node_id not in self._connected:
            raise NodeUnreachable(f"node {node_id} is not connected")

    def connect_all(self, node_ids: list[str]) -> None:
        self._connected |= set(node_ids)
        for node_id in node_ids:
            self.feed.announce(Change("connected", node_id))

    def peers(self) -> tuple[PeerInfo, ...]:
        return tuple(PeerInfo(node_id, rtt_s=0.02) for node_id in self._connected)

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        return self.feed.subscribe()

    def serve(self, on_request: object, on_message: object) -> None:
        """Nobody asks."""

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        raise NodeUnreachable("nobody answers here")

    async def request(self, node_id: str, body: object, *_: object, timeout_s: float = 10.0) -> bytes:
        raise NodeUnreachable("nobody answers here")

    async def fetch(self, node_id: str, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        raise NodeUnreachable("nobody answers here")

    async def send(self, node_id: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        raise NodeUnreachable("nobody answers here")


def identity(number: int) -> Identity:
    key_pair = create_new_key_pair(number.to_bytes(32, "big"))
    return Identity(str(ID.from_pubkey(key_pair.public_key)), key_pair)


def announced(model_id: str, name: str, n_layers: int, ranges: tuple[tuple[int, int], ...]) -> ShardAnnounce:
    return ShardAnnounce(model_id=model_id, name=name, n_layers=n_layers, ranges=ranges)


def lies(node_id: str, turn: int) -> NodeRecord:
    number = hash((node_id, 0)) % 10**9
    ranges = tuple(
        (2 * n + turn % 2, 2 * n + 1 + turn % 2) for n in range(RECORD_RANGES_MAX // RECORD_MODELS_MAX)
    )
    models = tuple(
        announced(f"{number * 1000 + each:064x}", f"m-{number}-{each}", 1000, ranges) for each in range(256)
    )
    return NodeRecord(node_id=node_id, sequence=turn, models=models)


def honesty(node_ids: list[str]) -> Make:
    def make(node_id: str, turn: int) -> NodeRecord:
        rng = random.Random(f"{node_id} {turn}")
        first = node_ids.index(node_id) % 8 * 10
        models = tuple(
            announced(f"{m + 1:064x}", f"model-{m}", 80, ((first, first + 10),)) for m in range(20)
        )
        return NodeRecord(
            node_id=node_id,
            nickname=f"node {first}",
            sequence=turn,
            models=models,
            capability=NodeCapability(
                active_requests=rng.randrange(8),
                max_requests=8,
                observed_latencies=tuple(
                    ObservedLatency(model_id=f"{m + 1:064x}", decode_s=0.001, prefill_s=0.0001)
                    for m in range(20)
                ),
                observed_links=tuple(
                    ObservedLink(node_id=each, rtt_s=0.02) for each in rng.sample(node_ids, 32)
                ),
            ),
        )

    return make


def on_one_model(model_id: str, n_layers: int, node_ids: list[str]) -> Make:
    pairs = [(a, b) for a in range(n_layers) for b in range(a + 1, n_layers + 1)]

    def make(node_id: str, turn: int) -> NodeRecord:
        rng = random.Random(f"{node_id} {turn}")
        held = announced(model_id, "guide", n_layers, tuple(rng.sample(pairs, 60)))
        links = tuple(ObservedLink(node_id=each, rtt_s=1e-6) for each in rng.sample(node_ids, 32))
        latency = ObservedLatency(model_id=model_id, decode_s=1.0, prefill_s=1.0)
        said = NodeCapability(observed_links=links, observed_latencies=(latency,))
        return NodeRecord(node_id=node_id, sequence=turn, models=(held,), capability=said)

    return make


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", help="one scenario")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        trio.run(client, arguments.client)
        return
    print(f"python -m bench.loop_steps --seconds {arguments.seconds:g} on {machine()}\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|", flush=True)
    trio.run(measure, arguments.seconds, arguments.only)


async def client(url: str) -> None:
    """An open dashboard, and one chat after the other. Prints how long each took."""

    async def look() -> None:
        async with http.stream("GET", "/api/events") as response:
            async for _ in response.aiter_raw():
                pass

    question = {"role": "user", "content": "What is a job?"}
    body = {"model": "guide", "max_tokens": 24, "messages": [question]}
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=300) as http,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(look)
        while True:
            since_s = time.perf_counter()
            response = await http.post("/v1/chat/completions", json=body)
            print(f"{response.status_code} {time.perf_counter() - since_s:.4f}", flush=True)
            await trio.sleep(0.2)


async def measure(seconds: float, only: str | None) -> None:
    for name in ("quiet", "liars", "honest", "one model"):
        if only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                await run_scenario(name, seconds, Path(folder))


async def run_scenario(name: str, seconds: float, folder: Path) -> None:
    steps = Steps()
    async with AsyncExitStack() as stack:
        node, router, url = await stack.enter_async_context(open_bench_node(folder))
        counts = {"quiet": 0, "liars": N_LIARS, "honest": N_HONEST, "one model": N_ON_ONE}
        peers = [identity(1000 + number) for number in range(counts[name])]
        node_ids = [peer.node_id for peer in peers]
        (guide,) = [view for view in await node.models.list() if view.name == "guide"]
        makes: dict[str, tuple[Make, float]] = {
            "quiet": (lies, 1.0),
            "liars": (lies, 1.0),
            "honest": (honesty(node_ids), 5.0),
            "one model": (on_one_model(guide.model_id, guide.n_layers, node_ids), 10.0),
        }
        make, every_s = makes[name]
        # Signed beforehand: that is the work of others.
        n_rounds = 2 + int(seconds / every_s)
        said = await trio.to_thread.run_sync(lambda: [sealed(peers, make, turn) for turn in range(n_rounds)])
        router.connect_all(node_ids)
        command = [sys.executable, "-m", "bench.loop_steps", "--client", url]
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        try:
            await trio.sleep(3)  # It has begun to look and to ask.
            trio.lowlevel.add_instrument(steps)
            with trio.move_on_after(seconds):
                for turn in said:
                    until_s = trio.current_time() + every_s
                    for number, envelope in enumerate(turn):
                        hand_over(router, envelope)
                        due_s = until_s - every_s * (1 - (number + 1) / len(turn))
                        await trio.sleep_until(max(due_s, trio.current_time()))
                    await trio.sleep_until(until_s)
            trio.lowlevel.remove_instrument(steps)
        finally:
            process.terminate()
        assert process.stdout is not None
        answers = bytes(await process.stdout.receive_some(2**20)).decode().splitlines()
    report(name, len(peers), steps, answers)


def hand_over(router: HeardRouter, envelope: bytes) -> None:
    """As gossip does."""
    if router.spread.validate(MODELS, envelope):
        router.spread.receive(MODELS, envelope)


def sealed(peers: list[Identity], make: Make, turn: int) -> list[bytes]:
    return [
        seal(
            Envelope(
                node_id=peer.node_id,
                started_at_ms=1,
                sequence=turn + 1,
                record=encode_record(make(peer.node_id, turn)),
            ),
            peer.sign,
        )
        for peer in peers
    ]


def report(name: str, n_peers: int, steps: Steps, answers: list[str]) -> None:
    took_ms = sorted(each * 1000 for each in steps.took_s)

    def at(share: float) -> float:
        return took_ms[min(len(took_ms) - 1, int(share * len(took_ms)))]

    slowest = sorted(steps.longest_s.items(), key=lambda each: -each[1])[:3]
    whose = ", ".join(f"{task.rpartition('.')[2]} {took_s * 1000:.0f}" for task, took_s in slowest)
    chats = [float(line.split()[1]) for line in answers if line.startswith("200 ")]
    chat = f"{statistics.median(chats):.2f}" if chats else "-"
    times = f"{at(0.5):.3f} | {at(0.99):.2f} | {at(0.999):.1f} | {took_ms[-1]:.1f}"
    longest = f"{whose} | {steps.longest_by_clock_s * 1000:.1f}"
    cells = (
        f"{name} | {n_peers} | {len(took_ms)} | {times} | {longest} | {len(chats)} of {len(answers)} | {chat}"
    )
    print(f"| {cells} |", flush=True)


@asynccontextmanager
async def open_bench_node(folder: Path) -> AsyncIterator[tuple[Node, HeardRouter, str]]:
    config = Config(api=ApiTable(port=0), inference=InferenceTable(n_threads=1, n_ctx=2048))
    catalogue = Catalogue(folder / "catalogue.sqlite")
    await trio.to_thread.run_sync(catalogue.ensure, GUIDE_PATH, "guide")
    settings = WorkerSettings(cache_dir=folder / "cache", n_ctx=2048, n_threads=1)
    async with trio.open_nursery() as nursery:
        pool = WorkerPool(settings, folder / "run", on_change=lambda: node.holdings_changed())
        async with pool.running():
            router = HeardRouter(identity(1), nursery)
            registry = Registry(router.node_id)
            await nursery.start(follow_router, registry, router)
            transfer = ModelTransfer(
                router,
                registry,
                Store(catalogue, folder / "models"),
                TransferSettings(),
                in_use=pool.models,
                on_change=lambda: node.holdings_changed(),
            )
            pipelines = Pipelines(router, registry, pool, catalogue, router.node_id, PipelineSettings())
            pool.on_notice = pipelines.on_notice
            await nursery.start(pipelines.run)
            node = Node(
                config,
                router=router,
                registry=registry,
                pool=pool,
                catalogue=catalogue,
                pipelines=pipelines,
                transfer=transfer,
                gathering=SharedDigests(
                    folder / "downloads", router, transfer, may_believe=lambda node_id: True
                ),
            )
            await nursery.start(node.run)
            await node.start()
            entry, layers = await node.models.resolve("guide", None)
            await node.models.load(entry, layers, lambda done, total: None, lambda done, total: None)
            async with open_api(node, config) as url:
                # As the daemon does.
                gc.collect()
                gc.freeze()
                yield node, router, url
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    main()
