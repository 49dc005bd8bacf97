"""How long a stream stands still while something long happens in the same worker.

    python -m bench.decode_pauses --rounds 3

A real worker process generates without end and is given one call beside that: a forward for a part of a model
of 200 MB, which has to be cut for it, or 1.4 MB to tokenize, as text or as a conversation. Figures
are the longest time between two tokens from the call to the token after its answer, and as rivals the median
step before it and the time that the call took.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.figures import Figure, publish
from bench.common.shapes import Shape, build
from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_worker_message, encode_ipc
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.tensors import encode_tensor

LARGE = Shape(n_layers=12, n_embd=1024, n_heads=8, n_kv_heads=4, n_ff=4096, n_vocab=512)
TEXT = "A pipeline is an ordered list of stages that covers the layers once. " * 20_000
PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)
ENDLESS = ipc.Sampling(temperature=0.0, max_tokens=30_000, ignore_eos=True)
N_BEFORE = 60


class Stream:
    """A worker that generates, and when its tokens came."""

    def __init__(self, folder: Path, model: Path, n_ctx: int) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "socket"))
            listener.listen(1)
            command = [sys.executable, "-m", "swarmllm_workers", "--socket", str(folder / "socket")]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            self._socket, _ = listener.accept()
        self._decoder = FrameDecoder()
        self._n_calls = 0
        self.times_s: list[float] = []
        self._messages: list[Any] = []
        opened = self.call(
            ipc.Open, path=str(model), cache_dir=str(folder / "segments"), n_ctx=n_ctx, n_prefixes=0
        )
        self.until_answered(opened)
        self.until_answered(self.call(ipc.Load, start=0, end=12))
        self.call(ipc.Generate, encode_tensor(PROMPT), request_id="stream", sampling=ENDLESS)
        self.until(lambda: len(self.times_s) >= N_BEFORE)

    def call(self, kind: type[ipc.DaemonMessage], payload: Any = b"", **fields: Any) -> int:
        self._n_calls += 1
        message: Any = kind(id=self._n_calls, **fields)
        self._socket.sendall(b"".join(encode_ipc(message, payload)))
        return self._n_calls

    def until_answered(self, call_id: int) -> None:
        self.until(lambda: any(each.id == call_id for each in self._messages))

    def until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            data = self._socket.recv(2**18)
            if not data:
                raise SystemExit("the worker has gone")
            for frame in self._decoder.feed(data):
                message = decode_worker_message(frame)
                if isinstance(message, ipc.Error):
                    raise SystemExit(message.message)
                if isinstance(message, ipc.Token):
                    self.times_s.append(time.perf_counter())
                elif not isinstance(message, ipc.Progress):
                    self._messages.append(message)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def measure(
    model: Path, n_ctx: int, kind: type[ipc.DaemonMessage], payload: Any, **fields: Any
) -> list[float]:
    """Milliseconds: the longest pause, the median step before, and what the call took."""
    with tempfile.TemporaryDirectory() as folder:
        stream = Stream(Path(folder), model, n_ctx)
        try:
            before_s = np.median(np.diff(stream.times_s[N_BEFORE // 4 :]))
            stream.times_s[:] = [time.perf_counter()]
            started_s = stream.times_s[0]
            stream.until_answered(stream.call(kind, payload, **fields))
            took_s = time.perf_counter() - started_s
            n = len(stream.times_s)
            stream.until(lambda: len(stream.times_s) > n)
            return [1000 * float(each) for each in (max(np.diff(stream.times_s)), before_s, took_s)]
        finally:
            stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = build(LARGE, Path(folder) / "large.gguf")
        rows = encode_tensor(np.ones((2, LARGE.n_embd), np.float32))
        part = {"request_id": "part", "start": 3, "end": 7, "position": 0, "want": "hidden"}
        talk = [{"role": "user", "content": TEXT}]
        calls: dict[str, tuple[Any, ...]] = {
            "a cut": (large, 4096, ipc.Forward, rows, part),
            "1.4 MB of text": (GUIDE_PATH, 32768, ipc.Tokenize, b"", {"text": TEXT}),
            "a conversation of 1.4 MB": (GUIDE_PATH, 32768, ipc.Tokenize, b"", {"messages": talk}),
        }
        figures = {
            (name, what): Figure(f"{name}: {what}", "ms")
            for name in calls
            for what in ("longest pause", "step before", "the call")
        }
        for _ in range(arguments.rounds):
            for name, (model, n_ctx, kind, payload, fields) in calls.items():
                found = measure(model, n_ctx, kind, payload, **fields)
                for what, value in zip(("longest pause", "step before", "the call"), found, strict=True):
                    figures[name, what].values.append(value)
    command = f"python -m bench.decode_pauses --rounds {arguments.rounds}"
    publish("decode-pauses", command, [(figure, None) for figure in figures.values()])


if __name__ == "__main__":
    main()
