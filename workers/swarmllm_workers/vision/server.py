"""The loop of a worker that encodes pictures and sounds: one message after the other, each answered before
the next.

A picture, a sound or a projector can end this process (libmtmd aborts where it should refuse), and nothing
else lives in it. The daemon bounds the time of each by ending it, too.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
from msgspec import UNSET

from swarmllm_proto import ipc
from swarmllm_proto.codec import call_id_of, decode_daemon_message, encode_ipc
from swarmllm_proto.errors import BadMessage, ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.limits import IPC_HEADER_MAX, PICTURE_BYTES_MAX
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers import __version__
from swarmllm_workers.errors import CallError
from swarmllm_workers.vision.decoding import jpeg_of, pixels_of, smaller_png
from swarmllm_workers.vision.projector import EncodedPart, Projector

log = logging.getLogger(__name__)

RECEIVE_SIZE: Final = 256 * 1024


class EncoderServer:
    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        self._projector: Projector | None = None
        self._is_finished = False
        self._handlers: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.OpenProjector: self._open,
            ipc.EncodePicture: self._encode,
            ipc.EncodeSound: self._encode_sound,
            ipc.RecodePicture: self._recode,
            ipc.Shutdown: self._shutdown,
        }

    def serve(self) -> None:
        """Until Shutdown or the end of the stream."""
        self._connection.setblocking(True)
        decoder = FrameDecoder(IPC_HEADER_MAX, PICTURE_BYTES_MAX)
        try:
            self._send(
                ipc.Ready(
                    pid=self._pid, version=__version__, engine=f"llama-cpp-python {llama_cpp.__version__}"
                )
            )
            while not self._is_finished and (data := self._connection.recv(RECEIVE_SIZE)):
                for frame in decoder.feed(data):
                    self._handle(frame)
                    if self._is_finished:
                        return
        except (BrokenPipeError, ConnectionResetError):
            log.info("the daemon has gone")
        except ProtocolError as error:
            log.warning("the stream is broken: %s", error)

    def _send(self, message: Any, payload: Any = b"") -> None:
        for piece in encode_ipc(message, payload):
            self._connection.sendall(piece)

    def _handle(self, frame: Frame) -> None:
        try:
            message = decode_daemon_message(frame)
        except BadMessage as error:
            self._fail(call_id_of(frame), CallError("bad_message", error.reason, error.field))
            return
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise CallError(
                    "bad_message", "this worker encodes pictures and sounds, and nothing else", "type"
                )
            handler(message, frame.payload)
        except CallError as error:
            self._fail(message.id, error)
        except MemoryError:
            self._fail(message.id, CallError("out_of_memory", "out of memory"))

    def _fail(self, call_id: int, error: CallError) -> None:
        self._send(ipc.Error(id=call_id, kind=error.kind, message=error.message, field=error.field))

    def _open(self, message: ipc.OpenProjector, _payload: memoryview) -> None:
        if self._projector is not None:
            raise CallError("bad_message", "a projector is open already", "type")
        projector = Projector(Path(message.path), Path(message.projector), message.n_threads)
        n_rows = projector.probe()
        self._projector = projector
        self._send(
            ipc.ProjectorOpened(
                id=message.id,
                n_embd=projector.n_embd,
                n_rows=n_rows,
                takes=UNSET if projector.takes == ("picture",) else projector.takes,
            )
        )

    def _opened(self) -> Projector:
        if self._projector is None:
            raise CallError("bad_message", "no projector is open: OpenProjector comes first", "type")
        return self._projector

    def _encode(self, message: ipc.EncodePicture, payload: memoryview) -> None:
        projector, started = self._opened(), time.perf_counter()
        if "picture" not in projector.takes:
            raise CallError("bad_picture", "this projector encodes no pictures", "kind")
        self._tell(message.id, projector.encode(pixels_of(message, payload)), started)

    def _encode_sound(self, message: ipc.EncodeSound, payload: memoryview) -> None:
        projector, started = self._opened(), time.perf_counter()
        self._tell(message.id, projector.encode_sound(projector.decode_sound(message, payload)), started)

    def _tell(self, call_id: int, parts: list[EncodedPart], started: float) -> None:
        rows = np.concatenate([part.rows for part in parts if part.rows is not None])
        told = tuple(
            ipc.PicturePart(
                part.tokens, 0 if part.rows is None else len(part.rows), part.grid_width, part.is_causal
            )
            for part in parts
        )
        compute_s = time.perf_counter() - started
        self._send(ipc.PictureEncoded(id=call_id, parts=told, compute_s=compute_s), encode_tensor(rows))

    def _recode(self, message: ipc.RecodePicture, payload: memoryview) -> None:
        pixels, side_max = pixels_of(message, payload), message.side_max
        recoded = jpeg_of(pixels) if side_max is UNSET else smaller_png(pixels, side_max)
        self._send(ipc.PictureRecoded(id=message.id), recoded)

    def _shutdown(self, message: ipc.Shutdown, _payload: memoryview) -> None:
        self._is_finished = True
        self._send(ipc.Bye(id=message.id))
