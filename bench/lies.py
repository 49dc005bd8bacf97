"""A swarm in which one member lies: `python -m bench.lies [--minutes 60] [--seed S] [--daemons]`.

Untruths are drawn from the types of the messages between nodes (`untruths`) and told by a member of a swarm
of three honest nodes: in memory (`lying_swarm`), or with `--daemons` real ones on loopback
(`lying_daemons`), to whom it lies below the daemons as well (`router_lies`). After each lie all honest
nodes have to answer as before.

Stops at the first lie that breaks anything (`--keep-going`: does not) and prints it, with the command that
tells it again: a lie depends on the seed and its number only. The figures go to bench/results/lies.json, or
lies-daemons.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import trio

from bench.common.figures import RESULTS, machine
from bench.common.patient_clock import patient_clock
from bench.fuzz import Mark
from bench.lying.daemons import open_lying_daemons
from bench.lying.liar import Lie, lies
from bench.lying.router import RouterLie, router_lies
from bench.lying.swarm import guide_world, open_lying_swarm
from bench.lying.untruths import drawn

SEED = 20261122
BATCH = 10
"""Lies drawn at once. The first of a batch is always the simplest of its kind."""
MARKS = 10
WARM_UP_MARKS = 2
STEADY_LIES = 2000
"""Caches and histories fill before they are full: of fewer lies the memory says nothing."""
BLOCKS_GROWTH_MAX = 0.05
RESIDENT_GROWTH_MAX_BYTES = 96 * 2**20
SLOWER_MAX = 2.0
"""Of the median answer, over the median without a liar."""


@dataclass
class Figures:
    seed: int
    machine: str = field(default_factory=machine)
    n_lies: int = 0
    seconds: float = 0.0
    broken: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """That Python has allocated here, after each tenth of the time."""
    resident_mib: list[float] = field(default_factory=list)
    """Of this process, or of the three daemons together."""
    answer_s: dict[str, float] = field(default_factory=dict)
    """Of daemons: medians without a liar, beside the lies, and after them."""

    def faults(self) -> Iterator[str]:
        yield from self.broken
        if self.answer_s and self.answer_s["after"] > SLOWER_MAX * self.answer_s["without"]:
            yield f"answers became slower: {self.answer_s}"
        if self.n_lies < STEADY_LIES:
            return
        blocks, resident = self.blocks[WARM_UP_MARKS:], self.resident_mib[WARM_UP_MARKS:]
        if blocks and blocks[-1] > blocks[0] * (1 + BLOCKS_GROWTH_MAX):
            yield f"memory is not flat: {blocks} blocks"
        if resident and (resident[-1] - resident[0]) * 2**20 > RESIDENT_GROWTH_MAX_BYTES:
            yield f"memory is not flat: {resident} MiB"


def lie_of(seed: int, number: int) -> Lie:
    return _lies(seed, number // BATCH)[number % BATCH]


def router_lie_of(seed: int, number: int) -> RouterLie:
    return _router_lies(seed, number // BATCH)[number % BATCH]


@lru_cache(maxsize=2)
def _lies(seed: int, batch: int) -> list[Lie]:
    return drawn(lies(guide_world()), seed * 1_000_003 + batch, BATCH)


@lru_cache(maxsize=2)
def _router_lies(seed: int, batch: int) -> list[RouterLie]:
    return drawn(router_lies(guide_world()), seed * 1_000_003 + batch, BATCH)


async def in_memory(figures: Figures, numbers: Iterator[int], watch: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_lying_swarm(Path(folder) / "swarm") as swarm:
            await _tell_all(
                figures,
                numbers,
                watch,
                lambda number: swarm.tell(lie_of(figures.seed, number)),
                swarm.log.latest,
            )


async def with_daemons(figures: Figures, numbers: Iterator[int], watch: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_lying_daemons(Path(folder)) as swarm:

            async def tell(number: int) -> None:
                await swarm.tell(lie_of(figures.seed, number), router_lie_of(figures.seed, number))
                figures.answer_s = swarm.answer_s()

            def look() -> None:
                watch()
                figures.resident_mib[-1:] = [swarm.resident_mib()]

            await _tell_all(figures, numbers, look, tell, swarm.latest)


async def _tell_all(
    figures: Figures,
    numbers: Iterator[int],
    watch: Callable[[], None],
    tell: Callable[[int], Awaitable[None]],
    latest: Any,
) -> None:
    for number in numbers:
        try:
            await tell(number)
        except Exception as error:
            reasons = [str(cause) or repr(cause) for cause in causes(error)]
            figures.broken.append(f"lie {number}: {'; '.join(reasons)}"[:2000])
            print(
                f"lie {number} of seed {figures.seed} broke something:", *reasons, sep="\n  ", file=sys.stderr
            )
            print(repr(lie_of(figures.seed, number))[:4000], file=sys.stderr)
            print(*list(latest)[-20:], sep="\n", file=sys.stderr)
            return
        figures.n_lies += 1
        watch()


def causes(error: BaseException) -> Iterator[BaseException]:
    """What is in an exception group, and in the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from causes(inner)
    else:
        yield error


def run(
    seed: int,
    duration_s: float,
    *,
    lies_max: int | None = None,
    only: int | None = None,
    daemons: bool = False,
    keep_going: bool = False,
) -> Figures:
    """Tell lies for so long and no more than so many, or the one with that number. `keep_going`: what was
    broken is replaced by a new swarm."""
    figures, began_s = Figures(seed), time.monotonic()

    def numbers() -> Iterator[int]:
        if only is not None:
            yield only
            return
        for number in itertools.count():
            if number == lies_max or time.monotonic() >= began_s + duration_s:
                return
            yield number

    def watch() -> None:
        if time.monotonic() - began_s >= duration_s / MARKS * (len(figures.blocks) + 1):
            mark = Mark.now()
            figures.blocks.append(mark.n_blocks)
            figures.resident_mib.append(mark.resident_bytes / 2**20)

    left = numbers()
    while True:
        n_broken = len(figures.broken)
        if daemons:
            trio.run(with_daemons, figures, left, watch)
        else:
            with patient_clock() as clock:
                trio.run(in_memory, figures, left, watch, clock=clock)
        if not keep_going or len(figures.broken) == n_broken:
            break
    figures.seconds = round(time.monotonic() - began_s, 1)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, help="tell the lie with this number, and no other")
    parser.add_argument("--daemons", action="store_true", help="real daemons on loopback")
    parser.add_argument(
        "--keep-going", action="store_true", help="after a lie that broke something, go on with a new swarm"
    )
    options = parser.parse_args()
    figures = run(
        options.seed,
        60 * options.minutes,
        only=options.only,
        daemons=options.daemons,
        keep_going=options.keep_going,
    )
    faults = list(figures.faults())
    report = asdict(figures) | {"faults": faults}
    if options.only is None:
        name = "lies-daemons.json" if options.daemons else "lies.json"
        (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")
    print(f"{figures.n_lies} lies in {figures.seconds:.0f} s, seed {figures.seed}: ", end="")
    print("; ".join(faults) or "nothing to report")
    if figures.broken:
        number = figures.broken[0].split(":")[0].removeprefix("lie ")
        daemons = " --daemons" if options.daemons else ""
        print(f"again: python -m bench.lies --seed {figures.seed} --only {number}{daemons}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
