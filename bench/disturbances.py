"""What happens to two hundred nodes to which something happens: simulated.

    python -m bench.disturbances [--nodes 200] [--churn-minutes 10]

Nodes that know the first one's address find each other; then, one after the other, a network in two halves
that heals, a crowd that comes at once, the death of half the swarm at once, clocks that are wrong by hours,
and nodes that come and go all the time. `bench.common.record_swarm` says what is real in it. Seconds are
simulated ones: nothing takes processor time, so the figures are those of the protocols, and not of machines.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import trio
from trio.testing import MockClock

from bench.common.record_swarm import RecordNetwork, RecordNode
from swarmllm.swarm.discovery.dialler import PEERS_MAX
from swarmllm_proto.identifiers import NodeId

RECORD_BYTES = 1500
HOUR_MS = 3_600_000
EPOCH_MS = 1_764_000_000_000
LOOK_EVERY_S = 0.1
DEADLINE_S = 400.0
PARTED_S = 60.0
QUIET_S = 120.0
CLOCK_WRONG_H = 12


@dataclass
class RecordSwarm:
    """The nodes that run, and the latest record of each."""

    network: RecordNetwork
    rng: random.Random
    clock_wrong_h: float = 0.0
    """So many hours fast or slow, at most, are the clocks of nodes."""
    peers_max: int = PEERS_MAX
    """Connections that each looks for."""
    published: dict[str, bytes] = field(default_factory=dict)
    started_ms: dict[str, int] = field(default_factory=dict)
    """By name: when the node started last, by its own clock in milliseconds."""
    nodes: dict[str, RecordNode] = field(default_factory=dict)
    first: RecordNode | None = None

    async def start(self, name: str) -> RecordNode:
        """A node of that name; one that was killed starts again."""
        wrong_ms = round(self.rng.uniform(-self.clock_wrong_h, self.clock_wrong_h) * HOUR_MS)
        now_ms = EPOCH_MS + round(trio.current_time() * 1000) + wrong_ms
        # As `spread.next_incarnation` has it.
        self.started_ms[name] = max(now_ms, self.started_ms.get(name, 0) + 1)
        bootstrap = None if self.first is None else self.first.node_id
        node = await self.network.start(
            name,
            bootstrap,
            started_at_ms=self.started_ms[name],
            record=self._record(name),
            peers_max=self.peers_max,
        )
        self.nodes[name] = node
        self.first = self.first or node
        return node

    def kill(self, name: str) -> None:
        node = self.nodes.pop(name)
        del self.published[name]
        self.network.kill(node)

    async def publish(self, name: str) -> None:
        """A new record."""
        await self.nodes[name].spread.publish(self._record(name))

    def _record(self, name: str) -> bytes:
        self.published[name] = self.rng.randbytes(RECORD_BYTES)
        return self.published[name]

    def n_lacking(self) -> int:
        """Pairs of nodes of which the one does not know what the other has said last, or does not count it as
        reachable."""
        return sum(1 for _ in self._lacking(None, None))

    def knows(
        self, readers: Collection[RecordNode] | None = None, names: Collection[str] | None = None
    ) -> bool:
        """Whether there are none, among these readers and the nodes of these names; without them, among
        all."""
        return next(self._lacking(readers, names), None) is None

    def _lacking(
        self, readers: Collection[RecordNode] | None, names: Collection[str] | None
    ) -> Iterator[tuple[RecordNode, NodeId]]:
        now = trio.current_time()
        wanted = {self.nodes[name].node_id: self.published[name] for name in names or self.nodes}
        for node in list(readers or self.nodes.values()):
            records, reachable = node.spread.records, node.reachable.at(now)
            for node_id, record in wanted.items():
                if node_id != node.node_id and (node_id not in reachable or records.get(node_id) != record):
                    yield node, node_id

    def n_dead(self) -> int:
        """Pairs of which one lives and counts the other, which does not, as reachable."""
        alive, now = self.network.nodes.keys(), trio.current_time()
        return sum(len(node.reachable.at(now) - alive) for node in self.nodes.values())

    def n_bytes(self) -> int:
        return sum(node.n_bytes for node in self.nodes.values())

    def n_dials(self) -> int:
        return sum(node.n_dials for node in self.nodes.values())


async def seconds_until(condition: Callable[[], bool]) -> float:
    """Raises trio.TooSlowError after DEADLINE_S."""
    began_s = trio.current_time()
    with trio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (many nodes are looked at, on a simulated clock)
            await trio.sleep(LOOK_EVERY_S)
    return round(trio.current_time() - began_s, 1)


Row = tuple[str, str]


async def started(swarm: RecordSwarm, n_nodes: int) -> list[Row]:
    for number in range(n_nodes):
        await swarm.start(f"node{number}")
    found_s = await seconds_until(swarm.knows)
    degree = sum(len(node.connected) for node in swarm.nodes.values()) / n_nodes
    return [
        (f"{n_nodes} start at once and know the first one: until all reach all", f"{found_s} s"),
        ("bytes that each was told until then", f"{swarm.n_bytes() / n_nodes / 1000:.0f} kB"),
        ("connections of each", f"{degree:.1f}"),
    ]


async def one_comes_and_goes(swarm: RecordSwarm) -> list[Row]:
    newcomer = await swarm.start("newcomer")
    routes_s = await seconds_until(lambda: swarm.knows([newcomer]))
    known_s = await seconds_until(lambda: swarm.knows(names=["newcomer"]))
    n_connected = len(newcomer.connected)
    swarm.kill("newcomer")
    await trio.sleep(5.0)
    return [
        ("one more: until it reaches all", f"{routes_s} s"),
        ("until all reach it", f"{routes_s + known_s:.1f} s"),
        (
            "it is killed: nodes that count it as reachable 5 s later "
            f"(of the others; {n_connected} were connected)",
            f"{swarm.n_dead()}",
        ),
    ]


async def halves(swarm: RecordSwarm) -> list[Row]:
    names = list(swarm.nodes)
    sides = {swarm.nodes[name].node_id: number % 2 for number, name in enumerate(names)}
    swarm.network.part(sides)
    await trio.sleep(PARTED_S / 2)
    for name in names[::4]:
        await swarm.publish(name)
    await trio.sleep(PARTED_S / 2)
    apart = swarm.n_lacking() / len(names)
    swarm.network.heal()
    healed_s = await seconds_until(swarm.knows)
    return [
        (
            f"two halves for {PARTED_S:.0f} s: each lacks of the others, or does not reach",
            f"{apart:.0f}",
        ),
        ("from then on until all reach all and know what was said meanwhile", f"{healed_s} s"),
    ]


async def crowd(swarm: RecordSwarm, n_more: int) -> list[Row]:
    bytes_before = swarm.n_bytes()
    before = list(swarm.nodes.values())
    for number in range(n_more):
        await swarm.start(f"crowd{number}")
    known_s = await seconds_until(swarm.knows)
    each = (swarm.n_bytes() - bytes_before) / len(swarm.nodes) / 1000
    most = max(len(node.connected) for node in before)
    return [
        (f"{n_more} come at once: until all reach all", f"{known_s} s"),
        ("bytes that each was told until then", f"{each:.0f} kB"),
        ("connections of the node with most", f"{most}"),
    ]


async def half_dies(swarm: RecordSwarm) -> list[Row]:
    dead = list(swarm.nodes)[1::2]
    for name in dead:
        swarm.kill(name)
    await trio.sleep(5.0)
    after = [swarm.n_dead() / len(swarm.nodes)]
    names = list(swarm.nodes)
    await swarm.publish(names[-1])
    news_s = await seconds_until(lambda: swarm.knows(names=[names[-1]]))
    left_s = await seconds_until(swarm.knows)
    await trio.sleep(55.0)
    after.append(swarm.n_dead() / len(swarm.nodes))
    forgotten_s = await seconds_until(lambda: swarm.n_dead() == 0)
    return [
        (f"{len(dead)} are killed at once: of them each counts as reachable 5 s later", f"{after[0]:.1f}"),
        ("until news of one that is left has reached all", f"{news_s} s"),
        ("until all that are left reach all", f"{5 + news_s + left_s:.1f} s"),
        ("of the dead each counts as reachable a minute later", f"{after[1]:.1f}"),
        ("until nobody counts any", f"{60 + forgotten_s:.0f} s"),
    ]


async def wrong_clocks(swarm: RecordSwarm) -> list[Row]:
    swarm.clock_wrong_h = CLOCK_WRONG_H
    names = list(swarm.nodes)[1::3]
    for name in names:
        swarm.kill(name)
        await swarm.start(name)
    back_s = await seconds_until(swarm.knows)
    await swarm.publish(names[0])
    news_s = await seconds_until(lambda: swarm.knows(names=[names[0]]))
    return [
        (
            f"{len(names)} start again, their clocks wrong by up to {CLOCK_WRONG_H} h: until all reach all",
            f"{back_s} s",
        ),
        ("until news of one of them has reached all", f"{news_s} s"),
    ]


async def churn(swarm: RecordSwarm, minutes: float) -> list[Row]:
    """A third of the nodes come and go, each after a minute or so; the others say something now and then."""
    swarm.clock_wrong_h = 0.0
    moving, staying = list(swarm.nodes)[1::3], list(swarm.nodes)[2::3]
    end_s = trio.current_time() + minutes * 60
    n_changes, n_said, late = 0, 0, 0
    n_staying = [swarm.nodes[name] for name in staying]
    told_before = sum(node.n_bytes for node in n_staying)
    while trio.current_time() < end_s:
        await trio.sleep(swarm.rng.expovariate(len(moving) / 60))
        name = swarm.rng.choice(moving)
        if name in swarm.nodes:
            swarm.kill(name)
        else:
            await swarm.start(name)
        n_changes += 1
        if swarm.rng.random() < 0.1:
            speaker = swarm.rng.choice(staying)
            await swarm.publish(speaker)
            n_said += 1
            await trio.sleep(2.0)
            late += not swarm.knows(n_staying, [speaker])
    told = sum(node.n_bytes for node in n_staying) - told_before
    settled_s = await seconds_until(swarm.knows)
    most = max(len(node.spread.records) for node in n_staying)
    return [
        (f"a third come and go for {minutes:g} minutes: changes", f"{n_changes}"),
        (
            "news of those that stay, and how many of them had not reached all of them after 2 s",
            f"{n_said}, {late}",
        ),
        ("after the last change, until all reach all", f"{settled_s} s"),
        ("each of those that stayed was told", f"{told / len(n_staying) / (minutes * 60) / 1000:.1f} kB/s"),
        (f"records that one of them keeps, at most (nodes: {len(swarm.nodes)})", f"{most}"),
    ]


async def quiet(swarm: RecordSwarm) -> list[Row]:
    await trio.sleep(QUIET_S)
    before, dials_before = swarm.n_bytes(), swarm.n_dials()
    await trio.sleep(QUIET_S)
    n_nodes = len(swarm.nodes)
    return [
        (
            f"nothing happens for {QUIET_S:.0f} s: each is told",
            f"{(swarm.n_bytes() - before) / n_nodes / QUIET_S:.0f} bytes/s",
        ),
        ("dials of each per hour", f"{(swarm.n_dials() - dials_before) / n_nodes * 3600 / QUIET_S:.1f}"),
    ]


async def run(n_nodes: int, churn_minutes: float, seed: int = 1) -> list[Row]:
    """One after the other, in the same swarm."""
    rows: list[Row] = []
    async with trio.open_nursery() as nursery:
        swarm = RecordSwarm(RecordNetwork(nursery, seed), random.Random(seed))
        scenes = [
            partial(started, swarm, n_nodes),
            partial(one_comes_and_goes, swarm),
            partial(quiet, swarm),
            partial(halves, swarm),
            partial(crowd, swarm, n_nodes // 2),
            partial(half_dies, swarm),
            partial(wrong_clocks, swarm),
            partial(churn, swarm, churn_minutes),
        ]
        for scene in scenes:
            rows += await scene()
            print(f"{time.process_time():.0f} s: {rows[-1]}", file=sys.stderr, flush=True)
        nursery.cancel_scope.cancel()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--churn-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    work = partial(run, options.nodes, options.churn_minutes, options.seed)
    rows = trio.run(work, clock=MockClock(autojump_threshold=0))
    print("| what happens | figure |\n|---|---|")
    print("\n".join(f"| {what} | {figure} |" for what, figure in rows))


if __name__ == "__main__":
    main()
