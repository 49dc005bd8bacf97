"""What a swarm costs each of its nodes as it grows, simulated: `python -m bench.scale --nodes 100 300 1000`.

`bench.simulation` at several sizes, each in a process of its own. Requests and changes come per node as often
at every size (each node asks once in `--ask-every-s` and something happens to it once in
`--change-every-s`), so that what grows with the size is what each node pays for the others. `--picture FILE`
draws it; that needs matplotlib: `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import trio
from trio.testing import MockClock

from bench.common.figures import RESULTS, machine, refuse_without_matplotlib
from bench.simulation import simulate


@dataclass(frozen=True)
class Size:
    n_nodes: int
    n_served: int
    n_asked: int
    ratio_p50: float
    """Of a request's duration to that of the oracle's route."""
    ratio_p95: float
    record_bytes_per_s: float
    """That each node hears, without envelopes."""
    moves_per_hour: float
    """Layers that each node loads because others left, once the swarm is settled."""
    took_s: float
    """Of this machine."""


def measure(n_nodes: int, minutes: float, ask_every_s: float, change_every_s: float, seed: int) -> Size:
    began_s = time.perf_counter()
    world = trio.run(
        lambda: simulate(
            n_nodes,
            minutes * 60,
            seed,
            ask_every_s=ask_every_s / n_nodes,
            change_every_s=change_every_s / n_nodes,
        ),
        clock=MockClock(autojump_threshold=0),
    )
    figures = world.figures
    ratios = sorted(figures.ratios)
    return Size(
        n_nodes=n_nodes,
        n_served=figures.n_asked - figures.n_unserved,
        n_asked=figures.n_asked,
        ratio_p50=round(statistics.median(ratios), 3),
        ratio_p95=round(ratios[min(len(ratios) - 1, int(0.95 * len(ratios)))], 3),
        record_bytes_per_s=round(figures.n_record_bytes / (minutes * 60)),
        moves_per_hour=round(figures.n_moved_layers / n_nodes / (minutes / 60), 3),
        took_s=round(time.perf_counter() - began_s, 1),
    )


def in_another_process(n_nodes: int, arguments: argparse.Namespace) -> Size:
    command = [sys.executable, "-m", "bench.scale", "--one", str(n_nodes), *_named(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Size(**json.loads(done.stdout.splitlines()[-1]))


def _named(arguments: argparse.Namespace) -> list[str]:
    names = ("minutes", "ask_every_s", "change_every_s", "seed")
    return [
        text for name in names for text in (f"--{name.replace('_', '-')}", f"{getattr(arguments, name):g}")
    ]


def table(sizes: list[Size]) -> str:
    lines = [
        "| nodes | requests served | against the oracle's route, p50 | p95 | bytes/s of records, each node "
        "| layers moved per hour, each node | simulated in s |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        cells = (
            size.n_nodes,
            f"{size.n_served} of {size.n_asked}",
            size.ratio_p50,
            size.ratio_p95,
            f"{size.record_bytes_per_s:.0f}",
            size.moves_per_hour,
            f"{size.took_s:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(sizes: list[Size], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    counts = [size.n_nodes for size in sizes]
    drawing, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    axes[0].loglog(counts, [size.record_bytes_per_s for size in sizes], "o-", color="#335c81")
    axes[0].set_ylabel("record bytes/s that each node hears")
    axes[1].semilogx(counts, [size.ratio_p50 for size in sizes], "o-", color="#335c81", label="p50")
    axes[1].semilogx(counts, [size.ratio_p95 for size in sizes], "o-", color="#b23a48", label="p95")
    axes[1].set_ylabel("duration / that of the oracle's route")
    axes[1].set_ylim(bottom=1.0)
    axes[1].legend()
    for axis in axes:
        axis.set_xlabel("nodes")
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    drawing.savefig(file, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--ask-every-s", type=float, default=500.0, help="of each node")
    parser.add_argument("--change-every-s", type=float, default=4000.0, help="of each node")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    refuse_without_matplotlib(parser, arguments.picture)
    if arguments.one:
        times_s = arguments.ask_every_s, arguments.change_every_s
        print(json.dumps(asdict(measure(arguments.one, arguments.minutes, *times_s, arguments.seed))))
        return
    sizes = [in_another_process(n_nodes, arguments) for n_nodes in arguments.nodes]
    print(table(sizes))
    command = (
        f"python -m bench.scale --nodes {' '.join(map(str, arguments.nodes))} {' '.join(_named(arguments))}"
    )
    RESULTS.mkdir(exist_ok=True)
    document = {"command": command, "machine": machine(), "sizes": [asdict(size) for size in sizes]}
    (RESULTS / "scale.json").write_text(json.dumps(document, indent=2) + "\n")
    (RESULTS / "scale.md").write_text(table(sizes) + "\n")
    if arguments.picture:
        draw(sizes, arguments.picture)


if __name__ == "__main__":
    main()
