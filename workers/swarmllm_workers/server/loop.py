"""The worker's loop: the thread that decodes, the daemon's socket, and the links of the ring.

What takes long and needs no context runs in two threads beside it (`background.py`): one opens, cuts and
closes layers, one reads what came from elsewhere (prompts, templates, snapshots). Sockets have no thread of
their own: a write never waits, and to hand a message over and wake a thread takes a third of the time that
writing it takes, and twice as much of another core's.

While there is work the socket is looked at between two steps and never waited for; without work the loop
sleeps in `poll`. Output is buffered and written as the socket takes it, so a daemon that reads slowly delays
nobody's decode step; beyond a bound on that buffer the steps wait, and no further message is read. The end of
the stream ends the worker.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from struct import Struct
from typing import Any, Final

from swarmllm_proto import ipc
from swarmllm_proto.codec import call_id_of, decode_daemon_message, encode_ipc
from swarmllm_proto.errors import BadMessage, ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_workers import __version__, operating_system
from swarmllm_workers.engine import runtime_check
from swarmllm_workers.engine.libllama import engine_version
from swarmllm_workers.schedule.read_ahead import ReadAhead
from swarmllm_workers.server.background import BackgroundThread, ThreadInbox
from swarmllm_workers.server.handlers import Handlers

PIECES_PER_WRITE: Final = 64
"""Buffers in one `sendmsg`; the kernel takes 1024 at most."""


class OutgoingFrames:
    """A queue of buffers that the daemon's socket has not taken yet. Sends them in order, as much as the
    socket takes, and copies each buffer at most once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pieces: deque[memoryview] = deque()
        self.n_bytes = 0
        """Not sent yet."""

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Queue the pieces and write what the socket takes now. What has to wait is copied, once, unless it
        is read-only: the caller may overwrite its buffers. Raises OSError where the daemon has gone."""
        n_new = 0
        for piece in pieces:
            if len(piece):
                view = memoryview(piece).cast("B")
                self._pieces.append(view)
                self.n_bytes += view.nbytes
                n_new += 1
        self.write()
        if not self._pieces:
            return
        # Older pieces lie before these, and are copies already.
        for i in range(max(0, len(self._pieces) - n_new), len(self._pieces)):
            if not self._pieces[i].readonly:
                self._pieces[i] = memoryview(bytes(self._pieces[i]))

    def write(self) -> None:
        """Write what the socket takes now. Raises OSError where the daemon has gone."""
        while self._pieces:
            try:
                n = self._connection.sendmsg(islice(self._pieces, PIECES_PER_WRITE))
            except (BlockingIOError, TimeoutError):
                return
            self.n_bytes -= n
            while self._pieces and n >= self._pieces[0].nbytes:
                n -= self._pieces.popleft().nbytes
            if n:
                self._pieces[0] = self._pieces[0][n:]


log = logging.getLogger(__name__)

RECEIVE_SIZE: Final = 256 * 1024
READS_PER_STEP: Final = 64
"""Bounds how long arriving data (16 MiB) can hold up the requests that run."""
LOADING_NICENESS: Final = 5
"""Of the thread that loads: readers come first."""
UNWRITTEN_MAX: Final = 32 * 2**20
"""Bytes in the output buffer above which no further step is made and no further message is read."""

_DESCRIPTOR: Final = Struct("i")
_ANCILLARY_SIZE: Final = socket.CMSG_SPACE(4 * _DESCRIPTOR.size)


class Server:
    def __init__(self, connection: socket.socket, pid: int, cores: Collection[int] = ()) -> None:
        """`cores`: where the threads beside this one may run; (): where this one may."""
        self._connection = connection
        self._decoder = FrameDecoder()
        self._outgoing = OutgoingFrames(connection)
        self._poll = select.poll()
        self._descriptors: deque[int] = deque()
        self._read_ahead = ReadAhead(self._receive, self._decoder)
        self._inbox = ThreadInbox()
        self._loading = BackgroundThread("loading", self._inbox, cores=cores, niceness=LOADING_NICENESS)
        self._parsing = BackgroundThread("parsing", self._inbox, cores=cores)
        self._handlers = Handlers(
            self.send,
            self._watch,
            self._take_descriptor,
            self._read_ahead,
            self._loading,
            self._parsing,
            cores,
        )
        self._pid = pid

    def send(self, message: Any, payload: Any = b"") -> None:
        """Queue a message and write what the socket takes now. Payloads are copied only if they have to
        wait."""
        self._outgoing.send(encode_ipc(message, payload))

    def serve(self) -> None:
        """Run until Shutdown, the last Unload, or the end of the stream."""
        self._connection.setblocking(False)
        for shortcoming in runtime_check.shortcomings():
            log.warning("runtime falls short: %s", shortcoming)
        self.send(ipc.Ready(pid=self._pid, version=__version__, engine=engine_version()))
        poll, own, watched, inbox = self._poll, self._connection.fileno(), 0, self._inbox.descriptor
        poll.register(inbox, select.POLLIN)
        was_stuck = False
        state, outgoing = self._handlers.state, self._outgoing
        try:
            while not state.is_finished:
                is_stuck = outgoing.n_bytes > UNWRITTEN_MAX
                wanted = (0 if is_stuck or self._handlers.is_full else select.POLLIN) | (
                    select.POLLOUT if outgoing.n_bytes else 0
                )
                if is_stuck is not was_stuck:
                    # What threads hand over would only make more output.
                    poll.register(inbox, 0 if is_stuck else select.POLLIN)
                    was_stuck = is_stuck
                if wanted != watched:
                    poll.register(own, wanted)
                    watched = wanted
                happened = poll.poll(None if is_stuck else self._handlers.pause_ms())
                n_left = len(happened)
                for descriptor, events in happened:
                    n_left -= 1
                    if descriptor == inbox:
                        self._inbox.run()
                        continue
                    if descriptor == self._handlers.grammars.descriptor:
                        self._handlers.grammars.receive()
                        continue
                    if descriptor != own:
                        self._handlers.ring.on_event(descriptor, events, is_last=not n_left and not is_stuck)
                        continue
                    if events & select.POLLOUT:
                        self._outgoing.write()
                    if events & ~select.POLLOUT and not self._read():
                        return
                scheduler = state.scheduler
                if scheduler is not None and scheduler.works and not self._is_stuck:
                    self._handlers.step()
                    self._handle_ahead()
            self._connection.setblocking(True)
            self._connection.settimeout(1.0)
            self._outgoing.write()
        except (BrokenPipeError, ConnectionResetError):
            log.info("the daemon has gone")
        except ProtocolError as error:
            log.warning("the stream is broken: %s", error)
            self._send_fatal(error)
        finally:
            self._end_threads()
            while self._descriptors:
                os.close(self._descriptors.popleft())

    def _end_threads(self) -> None:
        threads = self._loading, self._parsing
        for thread in threads:
            thread.stop()
        if any(thread.is_alive for thread in threads):
            # In the middle of something that uses what would be freed now; the system frees it as well.
            os._exit(0)
        self._handlers.close()

    @property
    def _is_stuck(self) -> bool:
        return self._outgoing.n_bytes > UNWRITTEN_MAX

    def _watch(self, descriptor: int, events: int) -> None:
        """Tell the ring of `events` on a link's socket; 0: no more."""
        if events:
            self._poll.register(descriptor, events)
        else:
            self._poll.unregister(descriptor)

    def _take_descriptor(self) -> int | None:
        """What came with the message that is being handled."""
        return self._descriptors.popleft() if self._descriptors else None

    def _receive(self) -> bytes:
        """Some bytes, and into `_descriptors` what came with them. Raises BlockingIOError."""
        data, ancillary = operating_system.receive(self._connection, RECEIVE_SIZE, _ANCILLARY_SIZE)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(content) - len(content) % _DESCRIPTOR.size
                descriptors = [each for (each,) in _DESCRIPTOR.iter_unpack(content[:whole])]
                operating_system.keep_private(descriptors)
                self._descriptors += descriptors
        return data

    def _read(self) -> bool:
        """Take what has arrived, so that all of it can share the next step. False at the end of the
        stream."""
        for _ in range(READS_PER_STEP):
            try:
                data = self._receive()
            except BlockingIOError:
                return True
            if not data:
                return False
            for frame in self._decoder.feed(data):
                self._handle(frame)
                if self._handlers.state.is_finished:
                    return True
            self._close_leftovers()
            if self._is_stuck or self._handlers.is_full:
                return True
        return True

    def _handle_ahead(self) -> None:
        """What came during the step."""
        for frame in self._read_ahead.take():
            if not self._handlers.state.is_finished:
                self._handle(frame)
        self._close_leftovers()

    def _close_leftovers(self) -> None:
        """Close what came with messages that were refused or wanted none, so that it is not taken for what
        comes with the next message. A message that has not arrived whole may still want its own."""
        while self._descriptors and not self._decoder.inside_frame:
            os.close(self._descriptors.popleft())

    def _handle(self, frame: Frame) -> None:
        try:
            message = decode_daemon_message(frame)
        except BadMessage as error:
            self.send(
                ipc.Error(id=call_id_of(frame), kind="bad_message", message=error.reason, field=error.field)
            )
        else:
            self._handlers.handle(message, frame.payload)

    def _send_fatal(self, error: ProtocolError) -> None:
        try:
            self._connection.settimeout(1.0)
            self.send(ipc.Error(kind="bad_message", message=error.reason, field=error.field, fatal=True))
        except OSError:
            log.info("the daemon has gone")
