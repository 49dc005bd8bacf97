"""What a hop costs inside the worker: from a readable socket to a row that has left, libllama left out.

    python -m bench.lone_hop --rounds 5 --steps 60

One process holds a quarter of the 0.5B model between two links, as a worker in the middle of a ring of four.
Jobs of two requests take turns: one is run as it comes (`LoneSteps`), the rival as a work of the scheduler.
Before each a step of a third request reads all weights, so that it finds the caches as in a ring, where the
other stages' weights went through them. Figures of a round are lower quartiles, which others on the machine
disturb least. How many functions of Python such a step runs is counted apart: nothing disturbs that.
"""

from __future__ import annotations

import swarmllm_workers  # noqa: F401  isort: skip  (its kernels stand before libllama)

import argparse
import cProfile
import select
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from bench.common.figures import Figure, ratios, table, write
from bench.common.models import half_billion
from bench.ring import connected
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, encode_job_frame
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import tensor_bytes
from swarmllm_workers.ring.link import ReceivingLink, SendingLink
from swarmllm_workers.server.handlers import Handlers

LAYERS = (12, 18)
SECRET = bytes(range(32)) + bytes(8)
PAYLOAD = tensor_bytes(np.random.default_rng(0).standard_normal((1, 896)).astype(np.float32))
TIMINGS = tuple(ipc.StageTiming(stage, 0.005, 0.006) for stage in range(2))


class Stopwatch:
    """When the calls that a hop's parts lie between began and ended."""

    def __init__(self) -> None:
        self.began_s = self.ended_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            self.began_s = time.perf_counter()
            result = function(*arguments)
            self.ended_s = time.perf_counter()
            return result

        return timed


class Stage:
    def __init__(self, folder: Path) -> None:
        descriptors: list[int] = []
        self.handlers = Handlers(self._hear, lambda descriptor, events: None, descriptors.pop)
        self._tell(ipc.Open(id=1, path=str(half_billion()), cache_dir=str(folder), flash_attention="auto"))
        self._tell(ipc.Load(id=1, start=LAYERS[0], end=LAYERS[1]))
        (before, receiving), (sending, after) = connected(), connected()
        self._descriptor = receiving.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        for end, peer, direction in ((receiving, "before", "receiving"), (sending, "after", "sending")):
            descriptors.append(end.detach())
            self._tell(ipc.TakeLink(id=1, peer=peer, direction=direction), SECRET)  # type: ignore[arg-type]
        self._before, self._after = SendingLink(before, SECRET), ReceivingLink(after, SECRET)
        self._libllama, self._kernel = Stopwatch(), Stopwatch()
        lib.llama_decode = self._libllama.around(lib.llama_decode)
        (link,) = self.handlers.ring._sending.values()
        link._write = self._kernel.around(link._write)  # type: ignore[method-assign]

    def seat(self, request_id: str) -> None:
        """And its prompt, one row."""
        fields: Any = {"id": 1, "request_id": request_id, "start": LAYERS[0], "end": LAYERS[1]}
        seat = {"stage": 2, "before": "before", "after": "after", "origin": "after", "n_prompt_tokens": 1}
        self._tell(ipc.TakeSeat(**fields, **seat))
        self._tell(ipc.Forward(**fields, position=0, want="hidden"), PAYLOAD)

    def step(self, request_id: str, position: int, *, alone: bool) -> tuple[float, float]:
        """Microseconds until its row has left, and from then until the worker may sleep."""
        self._send_job(request_id, position)
        self._tell(
            ipc.Forward(id=1, request_id="others", start=LAYERS[0], end=LAYERS[1], position=0, want="hidden"),
            PAYLOAD,
        )
        start_s = time.perf_counter()
        for descriptor, events in self._poll.poll():
            self.handlers.ring.on_event(descriptor, events, is_last=alone)
        while self.handlers.state.has_work:
            self.handlers.step()
        self.handlers.pause_ms()
        end_s = time.perf_counter()
        computing_s = self._libllama.ended_s - self._libllama.began_s
        (frame,) = self._after.receive()
        assert decode_job(frame.header, frame.payload).request_id == request_id
        return (
            (self._kernel.ended_s - start_s - computing_s) * 1e6,
            (end_s - self._kernel.ended_s) * 1e6,
        )

    def n_functions(self, request_id: str, n_steps: int) -> float:
        """Functions of Python for each of the first steps of a request, from the readable link to the sent
        row."""
        profile = cProfile.Profile(builtins=False)
        for position in range(1, n_steps + 1):
            self._send_job(request_id, position)
            self._poll.poll()
            profile.enable()
            self.handlers.ring.on_event(self._descriptor, select.POLLIN, is_last=True)
            profile.disable()
            self._after.receive()
        return float(sum(each.callcount for each in profile.getstats())) / n_steps

    def _send_job(self, request_id: str, position: int) -> None:
        job = LayerForward(
            request_id=request_id, step="layer", stage=2, position=position, n_tokens=1, timings=TIMINGS
        )
        self._before.send_bytes(encode_job_frame(job, PAYLOAD))

    def release(self, request_id: str) -> None:
        self._tell(ipc.CancelRequest(id=1, request_id=request_id))

    def _tell(self, message: Any, payload: bytes = b"") -> None:
        self.handlers.handle(message, memoryview(payload))
        while self.handlers.state.has_work:
            self.handlers.step()

    def _hear(self, message: Any, _payload: Any = b"") -> None:
        if isinstance(message, ipc.Error):
            raise SystemExit(message.message)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    figures = {
        (alone, part): Figure(f"{part}, {'run as it comes' if alone else 'as one of the works'}", "us")
        for part in ("until the row has left", "from then until asleep")
        for alone in (False, True)
    }
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        for round_index in range(arguments.rounds):
            times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            names = {alone: f"{round_index}-{alone}" for alone in times}
            for name in names.values():
                stage.seat(name)
            for position in range(1, arguments.steps + 1):
                for alone, name in names.items():
                    times[alone].append(stage.step(name, position, alone=alone))
            for name in names.values():
                stage.release(name)
            for (alone, part), figure in figures.items():
                column = 0 if part.startswith("until") else 1
                figure.values.append(float(np.percentile([each[column] for each in times[alone]], 25)))
        stage.seat("counted")
        functions = Figure("functions of Python, run as it comes", "")
        functions.values.append(stage.n_functions("counted", arguments.steps))
        stage.handlers.close()
    rows: list[tuple[Figure, Figure | None]] = []
    for (alone, part), figure in figures.items():
        rows.append((figure, ratios(figure, figures[False, part]) if alone else None))
    rows.append((functions, None))
    text = table(rows)
    print(text)
    command = f"python -m bench.lone_hop --rounds {arguments.rounds} --steps {arguments.steps}"
    write("lone-hop", command, rows, text)


if __name__ == "__main__":
    main()
