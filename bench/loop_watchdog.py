"""What the event loop's watchdog costs per step.

    python -m bench.loop_watchdog --rounds 5 --steps 100000

Steps of empty tasks with and without the watchdog take turns. One task alone is the worst case, because then
the loop looks for I/O after every step. A daemon pays this cost times its steps per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext

import trio

from swarmllm.loop_watchdog import LoopWatchdog


async def step(n: int) -> None:
    for _ in range(n):
        await trio.lowlevel.checkpoint()


async def once(n_steps: int, n_tasks: int, *, watched: bool) -> float:
    """Seconds per step."""
    with LoopWatchdog().watching() if watched else nullcontext():
        began_s = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(n_tasks):
                nursery.start_soon(step, n_steps // n_tasks)
        return (time.perf_counter() - began_s) / n_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    for n_tasks in (1, 8):
        costs = []
        for _ in range(arguments.rounds):
            alone = trio.run(lambda n=n_tasks: once(arguments.steps, n, watched=False))
            watched = trio.run(lambda n=n_tasks: once(arguments.steps, n, watched=True))
            costs.append((alone * 1e6, watched * 1e6))
        alone_us, watched_us = (statistics.median(each) for each in zip(*costs, strict=True))
        print(f"{n_tasks} tasks: {alone_us:.2f} us per empty step, {watched_us:.2f} us with the watchdog")


if __name__ == "__main__":
    main()
