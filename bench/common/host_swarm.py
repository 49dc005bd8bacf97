"""A swarm of libp2p hosts in several processes: starts and ends them, and waits for what all of them know."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.common.host_parts import HostPlan, Known, Look, MakePart, PartProcess
from swarmllm.swarm.discovery.dialler import PEERS_MAX

LOOK_EVERY_S = 0.25
LOOK_SHARE = 5.0
"""So many times as long as a look took, the next one waits: it takes processor time that the hosts need."""
DEADLINE_S = 500.0


class Swarm:
    """All hosts, in their parts."""

    def __init__(
        self, make: MakePart, folder: Path, namespaces: Sequence[str] = (), peers: int = PEERS_MAX
    ) -> None:
        """The parts are in the `namespaces` by turns; without any, on loopback."""
        self._make = make
        self._namespaces = namespaces
        self._folder = folder
        self._peers = peers
        self._n_parts = 0
        self.parts: list[PartProcess] = []
        self.hosts: dict[str, tuple[PartProcess, Known]] = {}
        self.bootstrap: tuple[str, ...] = ()
        self._spent_s = 0.0
        """Of the processor, by parts that have ended."""

    def part(self, clock_wrong_s: float = 0.0) -> PartProcess:
        if self._namespaces:
            number = self._n_parts % len(self._namespaces)
            made = self._make(f"10.87.0.{number + 1}", self._namespaces[number], clock_wrong_s)
        else:
            made = self._make("127.0.0.1", None, clock_wrong_s)
        self._n_parts += 1
        self.parts.append(made)
        return made

    def start(self, where: dict[PartProcess, list[str]]) -> None:
        """Returns when all of them listen."""
        if not self.bootstrap:
            first = next(iter(where))
            name = where[first].pop(0)
            self._started(first, first.do("start", [self._plan(first, name)]))
            self.bootstrap = self.hosts[name][1].addresses
        for part, names in where.items():
            part.tell("start", [self._plan(part, name) for name in names])
        for part in where:
            self._started(part, part.answer(300.0))
        self.expect()

    def _plan(self, part: PartProcess, name: str) -> HostPlan:
        return HostPlan(name, self._folder / name, part.listen_host, self.bootstrap, self._peers)

    def _started(self, part: PartProcess, known: dict[str, Known]) -> None:
        self.hosts |= {name: (part, each) for name, each in known.items()}

    def names(self, part: PartProcess) -> list[str]:
        return [name for name, (where, _) in self.hosts.items() if where is part]

    def kill(self, part: PartProcess) -> None:
        self._spent_s += part.do("look").processor_s
        part.kill()
        self.parts.remove(part)
        for name in self.names(part):
            del self.hosts[name]
        self.expect()

    def stop(self, name: str) -> None:
        part, _ = self.hosts.pop(name)
        part.do("stop", [name])
        self.expect()

    def publish(self, name: str, speech: str) -> None:
        part, known = self.hosts[name]
        record = part.do("publish", name, speech)
        self.hosts[name] = (part, Known(known.node_id, known.addresses, record))
        self.expect()

    def expect(self) -> None:
        records = {known.node_id: known.record for _, known in self.hosts.values()}
        self.everywhere("expect", records)

    def everywhere(self, command: str, *arguments: Any) -> list[Any]:
        for part in self.parts:
            part.tell(command, *arguments)
        return [part.answer() for part in self.parts]

    def look(self) -> Look:
        return sum(self.everywhere("look"), Look(processor_s=self._spent_s))

    def n_bytes(self) -> int:
        """Received in all namespaces so far."""
        by_namespace = {part.namespace: part.do("n_bytes_received") for part in self.parts}
        return sum(by_namespace.values())

    def until(self, condition: Callable[[Look], bool]) -> tuple[float, float]:
        """(seconds of the clock, seconds of the processor). Raises TimeoutError after DEADLINE_S."""
        began_s = time.monotonic()
        look, look_s = self._timed_look()
        before_s, told_s = look.processor_s, began_s
        while not condition(look):
            now = time.monotonic()
            if now - began_s > DEADLINE_S:
                raise TimeoutError(f"not after {now - began_s:.0f} s: {look}")
            if now - told_s > 5:
                told_s = now
                print(f"  {now - began_s:.0f} s: {told(look)}", file=sys.stderr, flush=True)
            time.sleep(max(LOOK_EVERY_S, LOOK_SHARE * look_s))
            look, look_s = self._timed_look()
        return time.monotonic() - began_s, look.processor_s - before_s

    def _timed_look(self) -> tuple[Look, float]:
        """(what there is to see, how many seconds it took to look)"""
        before_s = time.monotonic()
        look = self.look()
        return look, time.monotonic() - before_s


def told(look: Look) -> str:
    degrees = sorted(look.degrees) or [0]
    return (
        f"lacking {look.n_lacking}, dead {look.n_dead}, connections {degrees[0]} to {degrees[-1]}, median "
        f"{degrees[len(degrees) // 2]}; processor {look.processor_s:.0f} s, {look.resident_mib:.0f} MiB, "
        f"{look.n_tasks} tasks, {look.n_files} files"
    )


def all_know(look: Look) -> bool:
    return look.n_lacking == 0


def shared_out(names: Sequence[str], parts: Sequence[PartProcess]) -> dict[PartProcess, list[str]]:
    return {part: list(names[index :: len(parts)]) for index, part in enumerate(parts)}
