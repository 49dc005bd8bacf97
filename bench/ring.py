"""What a cut costs without any daemon: workers alone, and their links.

    python -m bench.ring --nodes 2 4 --rounds 6 --tokens 96

Contestants are workers as daemons start them, all resident, asked in turns: one with the uncut model, which
is the rival; one that runs the same layers in k segments (what k graphs cost instead of one); and rings of k
workers of a stage each, linked over TCP on loopback, encrypted (what processes and hops cost on top). What
is missing to `bench.decode` is what daemons cost. A figure of a round is the lower quartile of the times
between its tokens, which others on the machine disturb least.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.figures import Figure, ratios, table, write
from bench.common.models import half_billion
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, decode_worker_message, encode_ipc
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.swarm import StreamingToken
from swarmllm_proto.tensors import decode_tensor, encode_tensor

N_LAYERS = 24
PROMPT = np.arange(100, 116, dtype=np.int32)
SECRET = bytes(range(32)) + bytes(8)
TIMEOUT_S = 120.0


class Worker:
    """The daemon's end of a worker's socket."""

    def __init__(self, folder: Path, name: str, n_threads: int, ranges: Sequence[tuple[int, int]]) -> None:
        path = folder / name
        command = [
            sys.executable,
            "-m",
            "swarmllm_workers",
            "--socket",
            str(path),
            "--threads",
            str(n_threads),
        ]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(TIMEOUT_S)
            self._process = subprocess.Popen(command)
            self.socket, _ = listener.accept()
        self.socket.settimeout(TIMEOUT_S)
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []
        self._next()
        cache = str(folder / "cache")
        self.call(
            ipc.Open(
                id=1,
                path=str(half_billion()),
                cache_dir=cache,
                n_threads=n_threads,
                flash_attention="auto",
                n_ctx=2048,
            )
        )
        for start, end in ranges:
            self.call(ipc.Load(id=2, start=start, end=end))

    def send(self, message: Any, payload: Any = b"") -> None:
        self.socket.sendall(b"".join(encode_ipc(message, payload)))

    def call(self, message: Any, payload: Any = b"") -> Frame:
        """The answer, whatever comes before it left out."""
        self.send(message, payload)
        while True:
            answer, frame = self._next()
            if isinstance(answer, ipc.Error):
                raise SystemExit(answer.message)
            if answer.id == message.id and not isinstance(answer, ipc.Progress):
                return frame

    def take_link(self, end: socket.socket, peer: str, direction: Any) -> None:
        message = ipc.TakeLink(id=3, peer=peer, direction=direction)
        socket.send_fds(self.socket, [b"".join(encode_ipc(message, SECRET))], [end.fileno()])
        end.close()

    def messages(self) -> list[tuple[Any, Frame]]:
        """What has arrived: at least one."""
        messages = [self._next()]
        while self._frames:
            messages.append(self._next())
        return messages

    def _next(self) -> tuple[Any, Frame]:
        while not self._frames:
            data = self.socket.recv(2**18)
            if not data:
                raise EOFError("the worker is gone")
            self._frames += self._decoder.feed(data)
        frame = self._frames.pop(0)
        return decode_worker_message(frame), frame

    def close(self) -> None:
        self.socket.close()
        self._process.wait(30)


def ms_per_token_alone(worker: Worker, n_tokens: int) -> float:
    worker.send(ipc.Generate(id=4, request_id="r", sampling=sampling(n_tokens)), encode_tensor(PROMPT))
    came_s: list[float] = []
    while True:
        for message, _ in worker.messages():
            if isinstance(message, ipc.Token):
                came_s.append(time.perf_counter())
            if isinstance(message, ipc.GenerateDone):
                return typical_ms(came_s)


class RingOf:
    """`k` workers with a stage each. Node 0 is the origin."""

    def __init__(self, folder: Path, k: int, n_threads: int) -> None:
        bounds = [round(i * N_LAYERS / k) for i in range(k + 1)]
        self._ranges = list(pairwise(bounds))
        self._workers = [
            Worker(folder, f"ring-{k}-{stage}", n_threads, [layers])
            for stage, layers in enumerate(self._ranges)
        ]
        self._names = [f"node-{stage}" for stage in range(k)]
        self._n_asked = 0
        for stage, worker in enumerate(self._workers):
            after = (stage + 1) % k
            ours, theirs = connected()
            worker.take_link(ours, self._names[after], "sending")
            self._workers[after].take_link(theirs, self._names[stage], "receiving")

    def ms_per_token(self, n_tokens: int) -> float:
        self._n_asked += 1
        request_id = f"r{self._n_asked}"
        k = len(self._workers)
        for stage, worker in enumerate(self._workers):
            start, end = self._ranges[stage]
            worker.call(
                ipc.TakeSeat(
                    id=4 + 2 * self._n_asked,
                    request_id=request_id,
                    stage=stage,
                    start=start,
                    end=end,
                    before=self._names[stage - 1],
                    after=self._names[(stage + 1) % k],
                    origin=self._names[0],
                    n_prompt_tokens=len(PROMPT),
                    sampling=sampling(n_tokens) if stage == k - 1 else None,
                )
            )
        rows: Any = PROMPT
        for stage, worker in enumerate(self._workers):
            start, end = self._ranges[stage]
            is_last = stage == k - 1
            forward = ipc.Forward(
                id=5 + 2 * self._n_asked,
                request_id=request_id,
                start=start,
                end=end,
                position=0,
                want="token" if is_last else "hidden",
                sampling=sampling(n_tokens) if is_last else None,
                n_prompt_tokens=len(PROMPT),
                seat=stage if is_last else None,
            )
            frame = worker.call(forward, encode_tensor(rows))
            rows = None if is_last else decode_tensor(frame.payload)
        came_s: list[float] = []
        for token in self._tokens():
            came_s.append(time.perf_counter())
            if token.finish_reason is not None:
                break
        for worker in self._workers:
            worker.call(ipc.CancelRequest(id=4 + 2 * self._n_asked, request_id=request_id))
        return typical_ms(came_s)

    def _tokens(self) -> Iterator[StreamingToken]:
        """As the origin's daemon hears of them."""
        by_socket = {worker.socket: worker for worker in self._workers}
        while True:
            ready, _, _ = select.select(list(by_socket), [], [], TIMEOUT_S)
            for message, frame in (each for one in ready for each in by_socket[one].messages()):
                if isinstance(message, ipc.Arrived | ipc.Relay):
                    (inner,) = FrameDecoder().feed(frame.payload)
                    job = decode_job(inner.header, inner.payload)
                    if isinstance(job, StreamingToken):
                        yield job
                if isinstance(message, ipc.Error | ipc.LinkLost):
                    raise SystemExit(str(message))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def typical_ms(came_s: Sequence[float]) -> float:
    """The lower quartile of the times between tokens: what others on the machine take is in the rest."""
    return float(np.percentile(np.diff(came_s), 25)) * 1e3


def sampling(n_tokens: int) -> ipc.Sampling:
    return ipc.Sampling(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection, as the daemons set them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


@contextmanager
def closing(contestant: Any) -> Iterator[Any]:
    try:
        yield contestant
    finally:
        contestant.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    n_threads, n_tokens = arguments.threads, arguments.tokens
    uncut = Figure("one worker, uncut", "ms/token")
    alone = {k: Figure(f"one worker, {k} segments", "ms/token") for k in arguments.nodes}
    rings = {k: Figure(f"{k} workers, linked", "ms/token") for k in arguments.nodes}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def worker(name: str, k: int) -> Worker:
            bounds = [round(i * N_LAYERS / k) for i in range(k + 1)]
            return stack.enter_context(closing(Worker(folder, name, n_threads, list(pairwise(bounds)))))  # type: ignore[no-any-return]

        whole = worker("uncut", 1)
        chains = {k: worker(f"chain-{k}", k) for k in arguments.nodes}
        linked = {k: stack.enter_context(closing(RingOf(folder, k, n_threads))) for k in arguments.nodes}
        for round_index in range(arguments.rounds + 1):
            n = n_tokens if round_index else 16
            times = [ms_per_token_alone(whole, n)]
            times += [ms_per_token_alone(chains[k], n) for k in arguments.nodes]
            times += [linked[k].ms_per_token(n) for k in arguments.nodes]
            if round_index:
                for figure, value in zip((uncut, *alone.values(), *rings.values()), times, strict=True):
                    figure.values.append(value)
    rows = [
        (uncut, None),
        *((figure, ratios(figure, uncut)) for figure in (*alone.values(), *rings.values())),
    ]
    text = table(rows)
    print(text)
    command = f"python -m bench.ring --rounds {arguments.rounds} --tokens {n_tokens} --threads {n_threads}"
    write(f"ring-{n_threads}-threads", command, rows, text)


if __name__ == "__main__":
    main()
