"""A million damaged inputs through every decoder: `python -m bench.fuzz [--inputs N] [--seed S]`.

Not a race but an endurance test: nothing may come out of a decoder but a value or its own refusal, and the
memory must not grow. Exits with 1 and the offending input where either fails. The suite runs a small part of
it (tests/proto/test_fuzz.py).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import random
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common.figures import RESULTS, machine
from bench.decoders.hostile_bytes import golden, mutated, noise, reshaped
from bench.decoders.table import all_targets
from bench.decoders.target import Target

BLOCKS_GROWTH_MAX = 0.01
"""Of what Python has allocated, between a tenth of the way and the end: caches fill, leaks do not stop."""
GROWTH_MAX_BYTES = 64 * 2**20
"""Of resident memory, of which the allocators keep up to 40 MiB more or less for later use."""
MARKS = 10
"""Of how much memory there is."""
BATCH = 500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=20261121)
    options = parser.parse_args()
    # Each refusal that is worth a line in a log is one of a million here.
    logging.disable(logging.CRITICAL)
    targets = all_targets()
    counts = {name: [0, 0] for name in targets}
    foreign = golden()
    rng = random.Random(options.seed)
    started_s, done, marks = time.monotonic(), 0, list[Mark]()
    while done < options.inputs:
        for name, target in targets.items():
            for _ in range(BATCH // len(targets) + 1):
                data = hostile(target, foreign, rng)
                accepted = _try(name, target, data)
                if accepted is None:
                    return 1
                counts[name][accepted] += 1
                done += 1
        if done >= options.inputs / MARKS * (len(marks) + 1):
            marks.append(Mark.now())
    report = _report(counts, done, time.monotonic() - started_s, marks)
    print(report)
    (RESULTS / "fuzz.md").write_text(report + "\n")
    first, last = marks[0], marks[-1]
    has_grown = last.n_blocks > first.n_blocks * (1 + BLOCKS_GROWTH_MAX)
    return int(has_grown or last.resident_bytes - first.resident_bytes > GROWTH_MAX_BYTES)


@dataclass(frozen=True)
class Mark:
    """How much memory there is, when garbage and what the C library keeps have been given back."""

    resident_bytes: int
    n_blocks: int
    """That Python's allocator has given away."""

    @classmethod
    def now(cls) -> Mark:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * resource.getpagesize(), sys.getallocatedblocks())


def hostile(target: Target, foreign: dict[str, bytes], rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.05:
        return noise(rng)
    # What was meant for another decoder now and then.
    seeds = foreign if kind < 0.1 else target.seeds
    name = rng.choice(list(seeds))
    data = seeds[name]
    if kind < 0.4 and (other := reshaped(name, data, rng)) is not None:
        return other
    return mutated(data, rng)


def _try(name: str, target: Target, data: bytes) -> bool | None:
    """Whether it was accepted; None where something came out that must not."""
    try:
        target.decode(data)
    except target.refusals:
        return False
    except Exception as error:
        print(f"{name} let {error!r} out for {data!r}", file=sys.stderr)
        return None
    return True


def _report(counts: dict[str, list[int]], done: int, took_s: float, marks: list[Mark]) -> str:
    lines = [
        f"`python -m bench.fuzz` on {machine()}",
        "",
        f"{done:,} inputs in {took_s:.0f} s; nothing came out but values and refusals; blocks that Python "
        f"has allocated after each tenth: {', '.join(f'{mark.n_blocks:,}' for mark in marks)}; "
        f"resident memory: {', '.join(f'{mark.resident_bytes / 2**20:.0f}' for mark in marks)} MiB.",
        "",
        "| decoder | refused | accepted |",
        "|---|---|---|",
    ]
    return "\n".join(
        lines + [f"| {name} | {refused:,} | {accepted:,} |" for name, (refused, accepted) in counts.items()]
    )


if __name__ == "__main__":
    sys.exit(main())
