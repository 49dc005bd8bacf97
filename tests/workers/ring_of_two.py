"""Two real workers that hold half a model each, and the part of their daemons that a ring needs."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType
from node_ids import A, B

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, encode_ipc
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.limits import WINDOW_ROWS_MAX
from swarmllm_proto.swarm import LayerForward, StreamingToken
from swarmllm_proto.tensors import decode_tensor, encode_tensor, is_packed, tensor_bytes, unpack_rows

from .client import DEADLINE_S, Answer, Worker

NODES = (A, B)
SPLIT = 6
N_EMBD = 256
SECRET = bytes(range(32)) + bytes(8)


def give(worker: Worker, end: socket.socket, **fields: Any) -> None:
    """TakeLink, with its socket; the answer has id 0."""
    message = ipc.TakeLink(id=0, **fields)
    socket.send_fds(worker.socket, [b"".join(encode_ipc(message, SECRET))], [end.fileno()])
    end.close()


def open_halves(workers: tuple[Worker, Worker], **settings: Any) -> None:
    for worker, layers in zip(workers, ((0, SPLIT), (SPLIT, 12)), strict=True):
        worker.open(GUIDE_PATH, layers, **settings)


class RingOfTwo:
    """`origin`: the node whose clients ask, one of NODES or a third. `row_format`: of what the first stage
    sends."""

    def __init__(
        self, workers: tuple[Worker, Worker], origin: NodeId = A, row_format: RowFormat = "f32"
    ) -> None:
        self._row_format = row_format
        self.workers = workers
        self.origin = origin
        self.tokens: dict[str, dict[int, StreamingToken]] = {}
        self.text: dict[str, bytes] = {}
        self._early: dict[str, dict[int, tuple[StreamingToken, bytes]]] = {}
        """Tokens before which others are due, by request and index."""
        self.heard: list[Any] = []
        """What workers said, apart from answers to forwards."""
        self.on_token: Callable[[StreamingToken], None] = lambda token: None
        self.n_brought = 0
        """Jobs that came by way of the daemons."""
        self.cancelled: set[str] = set()
        self._done: set[tuple[int, int]] = set()
        self._calls: dict[tuple[int, int], tuple[int, LayerForward]] = {}
        self._prompts: dict[str, int] = {}
        self._samplings: dict[str, ipc.Sampling] = {}

    def link(self, sender: int) -> None:
        """From `sender` to the other."""
        ours, theirs = socket.socketpair()
        give(self.workers[1 - sender], theirs, peer=NODES[sender], direction="receiving")
        give(self.workers[sender], ours, peer=NODES[1 - sender], direction="sending")

    def close_links(self, end: int) -> None:
        self.workers[end].send(ipc.CloseLinks, peer=NODES[1 - end])

    def cancel(self) -> None:
        """Every request; returns when the workers have done so."""
        already = set(self.cancelled)
        self.cancelled |= self.tokens.keys()
        due = {
            (stage, worker.send(ipc.CancelRequest, request_id=request_id))
            for stage, worker in enumerate(self.workers)
            for request_id in self.tokens.keys() - already
        }
        self.run(lambda: due <= self._done)

    def clean_up(self) -> None:
        """Leave the workers as they were."""
        self.cancel()
        due = {
            (stage, worker.send(ipc.CloseLinks, peer=NODES[1 - stage]))
            for stage, worker in enumerate(self.workers)
        }
        self.run(lambda: due <= self._done)

    def start(
        self,
        request_id: str,
        prompt: np.ndarray,
        sampling: ipc.Sampling,
        *,
        tells_prompt: bool = False,
        ring: str | UnsetType = UNSET,
        feeds: bool = True,
    ) -> None:
        """Seats, and the prompt by way of the daemons, unless it `feeds` later. `tells_prompt`: the last
        worker knows it. `ring`: as in TakeSeat."""
        self._prompts[request_id], self._samplings[request_id] = len(prompt), sampling
        self.tokens[request_id], self.text[request_id] = {}, b""
        for stage, worker in enumerate(self.workers):
            worker.send(
                ipc.TakeSeat,
                request_id=request_id,
                stage=stage,
                start=(0, SPLIT)[stage],
                end=(SPLIT, 12)[stage],
                before=NODES[1 - stage],
                after=NODES[1 - stage],
                origin=self.origin,
                n_prompt_tokens=len(prompt),
                sampling=sampling if stage else None,
                row_format="f32" if stage else self._row_format,
                ring=ring,
            )
        if tells_prompt:
            last = len(self.workers) - 1
            known = b"".join(encode_tensor(prompt))
            self.workers[last].send(ipc.TakePrompt, known, request_id=request_id, stage=last, begins=True)
        if feeds:
            self.feed(request_id, prompt)

    def feed(self, request_id: str, prompt: np.ndarray, n_last: int = 0) -> None:
        """`n_last`: so many rows in a chunk of their own."""
        for at, rows in ((0, prompt[: len(prompt) - n_last]), (len(prompt) - n_last, prompt[-n_last:])):
            if n_last or not at:
                left = len(prompt) - at - len(rows)
                chunk = LayerForward(
                    request_id=request_id,
                    step="layer",
                    stage=0,
                    position=at,
                    n_tokens=len(rows),
                    prefill_left=left,
                )
                self.forward(chunk, b"".join(encode_tensor(rows)))

    def forward(self, job: LayerForward, payload: bytes) -> None:
        """A job that a daemon brings to its worker."""
        stage = job.stage
        self.n_brought += 1
        if job.step == "embed":
            payload = b"".join(encode_tensor(np.array([job.token, *(job.guesses or ())], np.int32)))
        elif is_packed(payload):
            payload = tensor_bytes(unpack_rows(payload, n_rows=job.n_tokens, width=N_EMBD))
        is_chunk = job.position < self._prompts[job.request_id]
        call_id = self.workers[stage].send(
            ipc.Forward,
            payload,
            request_id=job.request_id,
            start=(0, SPLIT)[stage],
            end=(SPLIT, 12)[stage],
            position=job.position,
            want="hidden" if not stage else "none" if job.prefill_left else "token",
            sampling=self._samplings[job.request_id] if stage and not job.prefill_left else None,
            n_prompt_tokens=self._prompts[job.request_id],
            seat=None if is_chunk and (not stage or job.prefill_left) else stage,
            timings=job.timings,
            resent=job.resent,
            number=job.number,
            fresh=job.fresh,
            rounded=not stage and self._row_format == "q8_0",
        )
        self._calls[stage, call_id] = (stage, job)

    def run(self, until: Callable[[], bool]) -> None:
        """Be both daemons until then."""
        deadline_s = time.monotonic() + DEADLINE_S
        sockets = {worker.socket: stage for stage, worker in enumerate(self.workers)}
        while not until():
            assert time.monotonic() < deadline_s, "the ring stands still"
            ready, _, _ = select.select(list(sockets), [], [], 0.1)
            if ready:
                # One at a time, the first node's before the last one's: what was said first is heard first.
                stage = min(sockets[each] for each in ready)
                # Not until there is an answer: the other worker may be the one that has something to say.
                self.workers[stage].read()
                while self.workers[stage].has_unread:
                    self._hear(stage, self.workers[stage].receive_any())

    def finished(self, request_id: str) -> bool:
        return any(token.finish_reason for token in self.tokens[request_id].values())

    def result(self, request_id: str) -> list[int]:
        tokens = self.tokens[request_id]
        assert sorted(tokens) == list(range(len(tokens)))
        return [tokens[index].token for index in range(len(tokens))]

    def _hear(self, stage: int, answer: Answer) -> None:
        message, payload = answer
        if isinstance(message, ipc.Done):
            self._done.add((stage, message.id))
        elif getattr(message, "request_id", "") in self.cancelled:
            self._calls.pop((stage, message.id), None)
        elif isinstance(message, ipc.Arrived | ipc.Relay):
            self.heard.append(message)
            (frame,) = FrameDecoder().feed(payload)
            job = decode_job(frame.header, frame.payload)
            if isinstance(job, StreamingToken):
                self._told(job, bytes(frame.payload))
            else:
                assert isinstance(job, LayerForward)
                if job.request_id in self.cancelled:
                    return
                assert isinstance(message, ipc.Relay), "a job for which there is a seat"
                assert message.receiver == NODES[job.stage]
                self.forward(job, bytes(frame.payload))
        elif isinstance(message, ipc.LayerResult | ipc.Token):
            self._answered(*self._calls.pop((stage, message.id)), answer)
        else:
            assert not isinstance(message, ipc.Error), message
            self.heard.append(message)

    def _answered(self, stage: int, job: LayerForward, answer: Answer) -> None:
        message, payload = answer
        if isinstance(message, ipc.LayerResult):
            if not message.onward and not stage:
                n_tokens = len(decode_tensor(payload))
                following = LayerForward(
                    request_id=job.request_id,
                    step="layer",
                    stage=1,
                    position=job.position,
                    n_tokens=n_tokens,
                    prefill_left=job.prefill_left,
                )
                self.forward(following, bytes(payload))
            return
        if not (message.onward and self.origin == NODES[0]):
            told = StreamingToken(
                request_id=job.request_id,
                index=message.index,
                token=message.token,
                finish_reason=message.finish_reason,
                stopped_by=message.stopped_by,
                logprobs=message.logprobs,
            )
            self._told(told, bytes(payload))
        if not message.onward and message.finish_reason is None:
            following = LayerForward(
                request_id=job.request_id,
                step="embed",
                stage=0,
                position=job.position + job.n_tokens,
                n_tokens=1,
                token=message.token,
            )
            self.forward(following, b"")

    def _told(self, token: StreamingToken, text: bytes) -> None:
        known = self.tokens[token.request_id]
        if token.index in known:
            assert known[token.index].token == token.token
            return
        # A token that left by a link that has ended comes by the daemons, and a later one may overtake it.
        early = self._early.setdefault(token.request_id, {})
        early[token.index] = token, text
        assert len(early) <= WINDOW_ROWS_MAX, "no more overtake it than one trip brings"
        while len(known) in early:
            token, text = early.pop(len(known))
            known[token.index] = token
            self.text[token.request_id] += text
            self.on_token(token)
