"""Three real daemons on loopback with a third of the bundled model each, and a lying member that speaks
through the project's own libp2p router.

After each lie every daemon is asked for an answer over HTTP, its pages are looked at, and `Broken` is
raised where one does not answer, answers something else, trusts an honest node less, or wrote a traceback
or too much into its log. The liar takes another identity every few lies: by then nobody believes it any
more.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import trio

from bench.common.swarm_nodes import demo_nodes
from bench.lying.liar import Liar, Lie
from bench.lying.router import RouterLie, lies_at, tell
from bench.lying.swarm import Broken, guide_world
from bench.lying.untruths import ADDRESSES, HONEST, LIVE, OWN, World
from swarmllm.cli.demo import DemoNode
from swarmllm.errors import SwarmLLMError
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import NodeRecord

HOLDINGS: Final = ("guide:0:4", "guide:4:8", "guide:8:12")
LIES_PER_IDENTITY: Final = 3
START_S: Final = 120.0
MEET_S: Final = 30.0
BESIDE_S: Final = 60.0
AFTER_S: Final = 30.0
TELL_S: Final = 20.0
LOG_MAX_BYTES: Final = 64 * 1024
"""Of one daemon, of one lie."""
INFERENCE: Final = {
    "n_threads": 1,
    "rr_ack_timeout_s": 4.0,
    "first_token_timeout_s": 12.0,
    "failover_timeout_s": 12.0,
}
"""Shorter than by default: a liar that stays silent is waited for in every lie."""
QUESTION: Final = {
    "model": "guide",
    "messages": [{"role": "user", "content": "What is a pipeline?"}],
    "temperature": 0,
    "max_tokens": 12,
}
PAGES: Final = ("/api/admin/stats", "/api/admin/models", "/api/admin/peers", "/v1/models", "/metrics")


@dataclass
class HonestDaemon:
    node: DemoNode
    node_id: str
    addresses: tuple[str, ...]
    http: httpx.AsyncClient
    n_logged: int = 0

    async def answer(self, within_s: float) -> tuple[str, float]:
        """Its text, and how long it took. Raises Broken."""
        began_s = trio.current_time()
        try:
            response = await self.http.post("/v1/chat/completions", json=QUESTION, timeout=within_s)
        except httpx.HTTPError as error:
            raise Broken(f"{self.node.name} did not answer within {within_s:g} s: {error!r}") from error
        if response.status_code != 200:
            raise Broken(f"{self.node.name}: {response.status_code} {response.text[:300]}")
        return response.json()["choices"][0]["message"]["content"], trio.current_time() - began_s

    def changes(self) -> str:
        """What it has logged since it was asked last."""
        with self.node.log_path.open("rb") as log:
            log.seek(self.n_logged)
            said = log.read()
        self.n_logged += len(said)
        return said.decode("utf-8", "replace")

    def resident_mib(self) -> float:
        lines = Path(f"/proc/{self.node.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@dataclass
class LyingDaemons:
    daemons: list[HonestDaemon]
    folder: Path
    nursery: trio.Nursery
    text: str = ""
    latest: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    _times_s: dict[str, list[float]] = field(
        default_factory=lambda: {"without": [], "beside": [], "after": []}
    )
    _router: Libp2pRouter | None = None
    _end: trio.Event = field(default_factory=trio.Event)
    _gone: trio.Event = field(default_factory=trio.Event)
    _n_told: int = 0

    def answer_s(self) -> dict[str, float]:
        return {when: round(statistics.median(times), 4) for when, times in self._times_s.items() if times}

    def resident_mib(self) -> float:
        return sum(daemon.resident_mib() for daemon in self.daemons)

    async def begin(self) -> None:
        """What answers are without a liar."""
        for _ in range(5):
            await self._ask_all("without", AFTER_S)
        for daemon in self.daemons:
            daemon.changes()

    async def tell(self, lie: Lie, below: RouterLie) -> None:
        """Raises Broken."""
        if self._n_told % LIES_PER_IDENTITY == 0:
            await self._new_identity(below)
        self._n_told += 1
        router = self._router
        assert router is not None
        world = self._world(router.node_id)
        names = _names(world)
        async with trio.open_nursery() as nursery:
            liar = Liar(router, world, lie, nursery.start_soon)
            liar.serve()
            lies_at(router, below, names)
            await liar.announce()
            await trio.sleep(0.1)
            async with trio.open_nursery() as telling:
                telling.start_soon(self._tell, liar, router, below, names)
                await self._ask_all("beside", BESIDE_S, may_differ=liar)
            nursery.cancel_scope.cancel()
        if self._n_told % LIES_PER_IDENTITY == 0:
            await self._leave()
        else:
            await router.publish(encode_record(NodeRecord(node_id=router.node_id)))
        await self._ask_all("after", AFTER_S, may_differ=None if self._router is None else liar)
        await self._look()

    async def _tell(self, liar: Liar, router: Libp2pRouter, below: RouterLie, names: dict[str, str]) -> None:
        with trio.move_on_after(TELL_S):
            await liar.tell()
            await tell(router, below, names, liar.world.honest_ids)

    async def _ask_all(self, when: str, within_s: float, may_differ: Liar | None = None) -> None:
        async def ask(daemon: HonestDaemon) -> None:
            text, took_s = await daemon.answer(within_s)
            self._times_s[when].append(took_s)
            self.text = self.text or text
            if text != self.text and not (may_differ is not None and may_differ.n_accepted):
                raise Broken(f"{daemon.node.name} answered {text!r} where {self.text!r} is due")

        async with trio.open_nursery() as nursery:
            for daemon in self.daemons:
                nursery.start_soon(ask, daemon)

    async def _look(self) -> None:
        for daemon in self.daemons:
            for page in PAGES:
                response = await daemon.http.get(page)
                if response.status_code != 200:
                    raise Broken(
                        f"{daemon.node.name}: {page} is {response.status_code}: {response.text[:200]}"
                    )
            for other in self.daemons:
                if other is not daemon:
                    await self._check_trust(daemon, other)
            said = daemon.changes()
            self.latest.extend(f"{daemon.node.name} {line[:300]}" for line in said.splitlines()[-15:])
            if "Traceback" in said:
                raise Broken(f"{daemon.node.name}: a traceback: {said[said.index('Traceback') :][:1500]}")
            if len(said) > LOG_MAX_BYTES:
                raise Broken(f"{daemon.node.name}: {len(said)} bytes in the log")

    async def _check_trust(self, daemon: HonestDaemon, other: HonestDaemon) -> None:
        response = await daemon.http.get(f"/api/admin/peers/{other.node_id}")
        trust = response.json()["trust"]
        if trust["score"] < NEUTRAL:
            raise Broken(
                f"{daemon.node.name} trusts {other.node.name} {trust['score']:.2f}: {trust['counts']}"
            )

    def _world(self, own_id: str) -> World:
        return replace(
            guide_world(),
            own_id=own_id,
            honest_ids=tuple(daemon.node_id for daemon in self.daemons),
            addresses=tuple(daemon.addresses[0].partition("/p2p/")[0] for daemon in self.daemons),
        )

    async def _new_identity(self, below: RouterLie) -> None:
        """It lies from the first question on."""
        await self._leave()
        folder = self.folder / f"liar-{self._n_told}"
        await trio.to_thread.run_sync(folder.mkdir)
        settings = SwarmSettings(folder, "127.0.0.1", 0, 0, bootstrap=(), mdns=False)
        self._router = await self.nursery.start(self._live, settings)
        lies_at(self._router, below, _names(self._world(self._router.node_id)))
        for daemon in self.daemons:
            with contextlib.suppress(SwarmLLMError):  # That one may have been faster.
                await self._router.connect(daemon.addresses[0])
        honest_ids = {daemon.node_id for daemon in self.daemons}
        with trio.fail_after(MEET_S):
            while not honest_ids <= self._router.connected():  # noqa: ASYNC110 - of another process
                await trio.sleep(0.05)

    async def _live(self, settings: SwarmSettings, *, task_status: Any) -> None:
        self._end, self._gone = trio.Event(), trio.Event()
        async with open_libp2p_router(settings) as router:
            task_status.started(router)
            await self._end.wait()
        self._gone.set()

    async def _leave(self) -> None:
        if self._router is not None:
            self._router = None
            self._end.set()
            await self._gone.wait()


def _names(world: World) -> dict[str, str]:
    """What the symbols of a lie stand for."""
    names = {LIVE: "nobody's", OWN: world.own_id, **dict(zip(HONEST, world.honest_ids, strict=True))}
    return names | dict(zip(ADDRESSES, world.addresses, strict=True))


@asynccontextmanager
async def open_lying_daemons(folder: Path) -> AsyncIterator[LyingDaemons]:
    """Three daemons that know each other, and nobody who lies yet."""
    with demo_nodes() as nodes:
        async with AsyncExitStack() as stack:
            daemons: list[HonestDaemon] = []
            for i, load in enumerate(HOLDINGS):
                bootstrap = [daemon.addresses[0] for daemon in daemons[:1]]
                node = nodes.start(f"honest-{i}", [load], bootstrap, INFERENCE)
                announced = await _announced(node)
                client = await stack.enter_async_context(
                    httpx.AsyncClient(base_url=announced["api_url"], trust_env=False, timeout=30.0)
                )
                daemons.append(
                    HonestDaemon(node, announced["node_id"], tuple(announced["addresses"]), client)
                )
            await _complete(daemons)
            # What the liar's own router thinks of it is nobody's business.
            ours = logging.getLogger("swarmllm")
            stack.callback(ours.setLevel, ours.level)
            ours.setLevel(logging.CRITICAL)
            async with trio.open_nursery() as nursery:
                swarm = LyingDaemons(daemons, folder, nursery)
                await swarm.begin()
                try:
                    yield swarm
                finally:
                    with trio.CancelScope(shield=True), trio.move_on_after(10):
                        await swarm._leave()
                nursery.cancel_scope.cancel()


async def _announced(node: DemoNode) -> dict[str, Any]:
    with trio.fail_after(START_S):
        while True:
            if (found := node.announcement()) is not None:
                return found
            if node.process.poll() is not None:
                raise Broken(f"{node.name} did not start: {node.log_tail(20)}")
            await trio.sleep(0.05)


async def _complete(daemons: list[HonestDaemon]) -> None:
    """Every one of them answers."""
    with trio.fail_after(START_S):
        for daemon in daemons:
            while True:
                try:
                    await daemon.answer(AFTER_S)
                    break
                except Broken:
                    await trio.sleep(0.2)
