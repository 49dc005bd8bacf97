"""What readers of running answers notice while a long prompt is admitted: with chunks, and without.

    python -m bench.admission --rounds 3

The bundled model answers two requests; after a while a third one comes with a prompt of `--prompt` tokens.
Figures are times between two tokens of the first two: before the prompt comes, and from its arrival until
its first token. "whole" admits as many rows as a batch has beside two readers' (510); "chunks" pieces of 128
rows, one in every batch; "shares" is how workers do it: pieces of 64 rows, after each of which the readers
have time of their own. The worker's loop runs in this process without its socket, so that planners can be
compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.figures import Figure, publish, ratios
from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.schedule.planner import CAPACITY, CHUNK, Planner
from swarmllm_workers.server.handlers import Handlers

N_ANSWERS = 32768
"""Cells for what the first two are told meanwhile."""
N_BEFORE = 300
"""Rounds before the prompt comes."""


class Loop:
    """A worker's loop: when each request got its tokens."""

    def __init__(self, folder: Path, n_ctx: int, n_threads: int) -> None:
        self.times_s: dict[str, list[float]] = {}
        self._n_calls = 0
        self.handlers = Handlers(self._on_message, lambda *_: None, lambda: None)
        self._call(
            ipc.Open,
            path=str(GUIDE_PATH),
            cache_dir=str(folder),
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_prefixes=0,
        )
        self._call(ipc.Load, start=0, end=12)

    def _on_message(self, message: Any, payload: Any = b"") -> None:
        if isinstance(message, ipc.Error):
            raise SystemExit(message.message)
        if isinstance(message, ipc.Token):
            self.times_s.setdefault(message.request_id, []).append(time.perf_counter())

    def _call(self, kind: type[ipc.DaemonMessage], data: np.ndarray | None = None, **fields: Any) -> None:
        self._n_calls += 1
        payload = b"" if data is None else b"".join(encode_tensor(data))
        self.handlers.handle(kind(id=self._n_calls, **fields), memoryview(payload))

    def generate(self, name: str, tokens: np.ndarray, n_tokens: int) -> None:
        self.times_s.pop(name, None)
        sampling = ipc.Sampling(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
        self._call(ipc.Generate, tokens, request_id=name, sampling=sampling)

    def cancel(self, name: str) -> None:
        self._call(ipc.CancelRequest, request_id=name)


def gaps_ms(times_s: list[float], start_s: float, end_s: float) -> np.ndarray:
    inside = [at for at in times_s if start_s <= at <= end_s]
    return np.diff(inside) * 1000


PLANNERS: dict[str, Callable[[], Planner]] = {
    "whole": lambda: Planner(chunk=CAPACITY - 2, beside=CAPACITY - 2, owes=False),
    "chunks": lambda: Planner(beside=CHUNK, owes=False),
    "shares": Planner,
}


def admit(loop: Loop, planner: Planner, prompt: np.ndarray) -> dict[str, float]:
    scheduler = loop.handlers.state.scheduler
    assert scheduler is not None
    scheduler._planner = planner
    readers = ("a", "b")
    for i, name in enumerate(readers):
        loop.generate(name, np.arange(20 + i, dtype=np.int32), 100_000)
    for _ in range(N_BEFORE):
        loop.handlers.step()
    came_s = time.perf_counter()
    loop.generate("long", prompt, 1)
    while "long" not in loop.times_s:
        loop.handlers.step()
    first_s = loop.times_s["long"][0]
    for name in readers:
        loop.cancel(name)
    before = np.concatenate([gaps_ms(loop.times_s[name][50:], 0.0, came_s) for name in readers])
    during = np.concatenate([gaps_ms(loop.times_s[name], came_s - 0.001, first_s) for name in readers])
    found = {
        "first token of the prompt": (first_s - came_s) * 1000,
        "both answers meanwhile": len(during) / (first_s - came_s),
    }
    for when, values in (("before", before), ("during", during)):
        found |= {
            f"{when}, p50": float(np.percentile(values, 50)),
            f"{when}, p95": float(np.percentile(values, 95)),
            f"{when}, longest": float(values.max()),
        }
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    loop = Loop(folder, arguments.prompt + N_ANSWERS, arguments.threads)
    prompt = np.random.default_rng(0).integers(0, 2000, arguments.prompt).astype(np.int32)
    figures: dict[tuple[str, str], Figure] = {}
    for _ in range(arguments.rounds):
        for side, planner in PLANNERS.items():
            for what, value in admit(loop, planner(), prompt).items():
                unit = "tokens/s" if "answers" in what else "ms"
                figures.setdefault((side, what), Figure(f"{what}, {side}", unit)).values.append(value)
    loop.handlers.close()
    rows: list[tuple[Figure, Figure | None]] = []
    for (side, what), figure in figures.items():
        rows.append((figure, None if side == "whole" else ratios(figure, figures["whole", what])))
    command = (
        f"python -m bench.admission --rounds {arguments.rounds} --prompt {arguments.prompt} "
        f"--threads {arguments.threads}"
    )
    publish("admission-guide", command, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
