"""The daemon's end of a worker's socket, blocking and small: what the worker's tests speak through."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from deadlines import DEADLINE_S as DEADLINE_S
from forked_worker import ForkedWorker
from kernel_timings import KERNEL_TIMINGS

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_worker_message, encode_ipc
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.tensors import decode_tensor, encode_tensor

M = TypeVar("M")

GREEDY = ipc.Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)


class Answer(NamedTuple):
    message: Any
    payload: memoryview


class Generated(NamedTuple):
    tokens: list[int]
    text: bytes
    done: ipc.GenerateDone


PROGRAM = ("-m", "swarmllm_workers")


def worker_command(socket_path: Path, *arguments: str, program: Sequence[str] = PROGRAM) -> list[str]:
    """`program`: what Python runs."""
    return [sys.executable, *program, "--socket", str(socket_path), *arguments]


def worker_environment() -> dict[str, str]:
    """Where the packages lie, for processes that pytest's `sys.path` does not reach."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Worker:
    def __init__(
        self,
        socket_path: Path,
        arguments: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        *,
        is_forked: bool = True,
    ) -> None:
        """`is_forked`: see `forked_worker`. A program of its own is started by itself."""
        self._cache_dir = socket_path.parent / "segments"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_path))
            listener.listen(1)
            listener.settimeout(DEADLINE_S)
            start = ForkedWorker if is_forked and program == PROGRAM else subprocess.Popen
            self.process: Any = start(
                worker_command(socket_path, *arguments, program=program),
                env=worker_environment(),
                stderr=subprocess.DEVNULL,
            )
            self.socket, _ = listener.accept()
        self.socket.settimeout(DEADLINE_S)
        self._decoder = FrameDecoder()
        self._answers: deque[Answer] = deque()
        self.at_work: list[bool] = []
        self._n_calls = 0
        self.ready = self.receive(ipc.Ready)

    def send(self, kind: type[ipc.DaemonMessage], payload: Any = b"", **fields: Any) -> int:
        """Write a message; its call id."""
        self._n_calls += 1
        self.socket.sendall(b"".join(encode_ipc(kind(id=self._n_calls, **fields), payload)))  # type: ignore[arg-type]
        return self._n_calls

    def receive_any(self) -> Answer:
        while not self._answers:
            self.read()
        return self._answers.popleft()

    def read(self) -> None:
        """What there is, or comes next. It need not be an answer."""
        data = self.socket.recv(262144)
        if not data:
            raise EOFError("the worker closed the socket")
        for frame in self._decoder.feed(data):
            message = decode_worker_message(frame)
            if isinstance(message, ipc.AtWork):
                # Said unasked, and of interest to one test only.
                self.at_work.append(message.is_at_work)
            else:
                self._answers.append(Answer(message, frame.payload))

    @property
    def has_unread(self) -> bool:
        """Messages that have been received and not been taken."""
        return bool(self._answers)

    def receive(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        answer = self.receive_any().message
        assert isinstance(answer, kind), answer
        return answer

    def call(self, kind: type[ipc.DaemonMessage], payload: Any = b"", **fields: Any) -> Answer:
        """Send and wait for the answer; progress is passed over."""
        call_id = self.send(kind, payload, **fields)
        while True:
            answer = self.receive_any()
            if not isinstance(answer.message, ipc.Progress):
                assert answer.message.id == call_id
                return answer

    def refused(self, kind: type[ipc.DaemonMessage], payload: Any = b"", **fields: Any) -> ipc.Error:
        answer = self.call(kind, payload, **fields).message
        assert isinstance(answer, ipc.Error), answer
        assert not answer.fatal
        return answer

    def open(self, path: Path, *ranges: tuple[int, int], **settings: Any) -> ipc.Opened:
        settings.setdefault("cache_dir", str(self._cache_dir))
        settings.setdefault("kernel_timings", str(KERNEL_TIMINGS))
        opened = self.call(ipc.Open, path=str(path), **settings).message
        assert isinstance(opened, ipc.Opened), opened
        for start, end in ranges:
            loaded = self.call(ipc.Load, start=start, end=end).message
            assert isinstance(loaded, ipc.Loaded), loaded
        return opened

    def tokenize(self, **fields: Any) -> np.ndarray:
        answer = self.call(ipc.Tokenize, **fields)
        assert isinstance(answer.message, ipc.Tokens), answer.message
        return decode_tensor(answer.payload)

    def forward(self, data: np.ndarray, **fields: Any) -> Answer:
        answer = self.call(ipc.Forward, encode_tensor(data), **fields)
        assert not isinstance(answer.message, ipc.Error), answer.message
        return answer

    def hidden(self, data: np.ndarray, **fields: Any) -> np.ndarray:
        return decode_tensor(self.forward(data, want="hidden", **fields).payload)

    def generate(
        self, tokens: np.ndarray, request_id: str = "r", sampling: ipc.Sampling = GREEDY
    ) -> Generated:
        self.send(ipc.Generate, encode_tensor(tokens), request_id=request_id, sampling=sampling)
        generated: list[int] = []
        text = b""
        while True:
            answer = self.receive_any()
            if isinstance(answer.message, ipc.GenerateDone):
                return Generated(generated, text, answer.message)
            assert isinstance(answer.message, ipc.Token), answer.message
            generated.append(answer.message.token)
            text += bytes(answer.payload)

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()
