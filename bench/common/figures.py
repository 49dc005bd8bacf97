"""Tables and result files that every benchmark writes the same way."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from swarmllm_workers.kernels.kernel_tuning import processor

RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Figure:
    """Repeated measurements of one thing, in one unit."""

    name: str
    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "min": min(self.values),
            "median": self.median,
            "max": max(self.values),
            "values": self.values,
        }


def ratios(ours: Figure, rival: Figure) -> Figure:
    """Ours over the rival's, round by round: the drift of a noisy machine hits both sides of a pair alike."""
    pairs = zip(ours.values, rival.values, strict=True)
    return Figure(f"{ours.name} / {rival.name}", "x", [a / b for a, b in pairs])


def refuse_without_matplotlib(parser: argparse.ArgumentParser, picture: Path | None) -> None:
    """Before minutes of measuring, not after them."""
    if picture is not None and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: .venv/bin/pip install -e '.[bench]'")


def machine() -> dict[str, object]:
    cpu, _ = processor()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "llama-cpp-python": version("llama-cpp-python"),
        "libp2p": version("libp2p"),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: Sequence[tuple[Figure, Figure | None]]) -> str:
    """Markdown: each figure, and its ratio against the rival where there is one."""
    lines = ["| what | unit | min | median | max | ratio (min / median / max) |", "|---|---|---|---|---|---|"]
    for figure, ratio in rows:
        spread = "" if ratio is None else _spread(ratio.values, ".2f")
        cells = [figure.name, figure.unit, *(f"{x:.4g}" for x in _three(figure.values)), spread]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def _spread(values: Sequence[float], form: str) -> str:
    return " / ".join(format(x, form) for x in _three(values))


def threads_suffix(n_threads: int) -> str:
    """For the name of a result that is not of as many threads as there are cores."""
    if n_threads == len(os.sched_getaffinity(0)):
        return ""
    return f"-{n_threads}-thread{'s' if n_threads > 1 else ''}"


def publish(name: str, command: str, rows: Sequence[tuple[Figure, Figure | None]]) -> None:
    """The table, on the screen and as `write` does."""
    text = table(rows)
    print(text)
    write(name, command, rows, text)


def write(name: str, command: str, rows: Sequence[tuple[Figure, Figure | None]], text: str) -> Path:
    """bench/results/NAME.json and .md: the command, the machine, every single value."""
    RESULTS.mkdir(exist_ok=True)
    result = {
        "command": command,
        "machine": machine(),
        "figures": [
            figure.as_json() | ({} if ratio is None else {"ratio": ratio.as_json()}) for figure, ratio in rows
        ],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    path = RESULTS / f"{name}.md"
    path.write_text(f"`{command}` on {machine()}\n\n{text}\n")
    return path
