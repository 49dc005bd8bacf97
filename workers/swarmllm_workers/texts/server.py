"""The loop of a worker that encodes whole texts: one message after the other, each answered before the next.

The daemon bounds the time of each text by ending the process.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import llama_cpp

from swarmllm_proto import ipc
from swarmllm_proto.codec import call_id_of, decode_daemon_message, encode_ipc
from swarmllm_proto.errors import BadMessage, ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.limits import IPC_HEADER_MAX, IPC_PAYLOAD_MAX
from swarmllm_proto.tensors import decode_tensor, encode_tensor
from swarmllm_workers import __version__
from swarmllm_workers.errors import CallError
from swarmllm_workers.texts.text_encoder import TextEncoder

log = logging.getLogger(__name__)

RECEIVE_SIZE: Final = 256 * 1024


class TextEncoderServer:
    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid
        self._encoder: TextEncoder | None = None
        self._is_finished = False
        self._handlers: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.OpenTextEncoder: self._open,
            ipc.EncodeText: self._encode,
            ipc.Shutdown: self._shutdown,
        }

    def serve(self) -> None:
        """Until Shutdown or the end of the stream."""
        self._connection.setblocking(True)
        decoder = FrameDecoder(IPC_HEADER_MAX, IPC_PAYLOAD_MAX)
        engine = f"llama-cpp-python {llama_cpp.__version__}"
        try:
            self._send(ipc.Ready(pid=self._pid, version=__version__, engine=engine))
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
                raise CallError("bad_message", "this worker encodes texts and nothing else", "type")
            handler(message, frame.payload)
        except CallError as error:
            self._fail(message.id, error)
        except ProtocolError as error:
            self._fail(message.id, CallError("bad_tensor", str(error), "payload"))
        except MemoryError:
            self._fail(message.id, CallError("out_of_memory", "out of memory"))

    def _fail(self, call_id: int, error: CallError) -> None:
        self._send(ipc.Error(id=call_id, kind=error.kind, message=error.message, field=error.field))

    def _open(self, message: ipc.OpenTextEncoder, _payload: memoryview) -> None:
        if self._encoder is not None:
            raise CallError("bad_message", "a model is open already", "type")
        self._encoder = encoder = TextEncoder(Path(message.path), message.n_threads)
        self._send(
            ipc.TextEncoderOpened(
                id=message.id,
                pooling=encoder.pooling,
                n_outputs=encoder.n_outputs,
                n_tokens_max=encoder.n_tokens_max,
            )
        )

    def _encode(self, message: ipc.EncodeText, payload: memoryview) -> None:
        if self._encoder is None:
            raise CallError("bad_message", "no model is open: OpenTextEncoder comes first", "type")
        started = time.perf_counter()
        if message.text is None:
            tokens = decode_tensor(payload)
            if tokens.ndim != 1 or tokens.dtype.kind != "i":
                raise CallError("bad_tensor", "token ids are i32 [n]", "payload")
        elif message.document is None:
            tokens = self._encoder.tokens(message.text)
        else:
            tokens = self._encoder.pair(message.text, message.document)
        values = self._encoder.encode(tokens)
        compute_s = time.perf_counter() - started
        answer = ipc.TextEncoded(id=message.id, n_tokens=len(tokens), compute_s=compute_s)
        self._send(answer, encode_tensor(values))

    def _shutdown(self, message: ipc.Shutdown, _payload: memoryview) -> None:
        self._is_finished = True
        self._send(ipc.Bye(id=message.id))
