"""Runs one generation as one HTTP response, whatever the dialect.

A `Reply` writes the format of its API. This module has what all of them share: a failure before the first
text has its own HTTP status, a waiting stream sends a comment before clients time out, and a generation ends
when its client leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio
from quart import Response

from swarmllm.api.http.context import current_caller, current_node, current_request_id
from swarmllm.api.http.errors import plain_errors
from swarmllm.api.http.request_tasks import start_request_task
from swarmllm.api.output.buffered_generation import BufferedGeneration, TextDelta
from swarmllm.api.output.swarm_report import swarm_headers
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.generation import Generation, Prompt
from swarmllm.scheduling.tiers import Caller
from swarmllm_proto.ipc import Sampling

HEADERS_AFTER_S = 10.0
"""A failure before this has its own HTTP status; later the stream begins, so that no client times out."""
WAITING_EVERY_S = 10.0
PROGRESS_EVERY_S = 2.0
"""A stream begins so soon, and says so often how far its model is, while that is loaded for it."""

EVENT_STREAM = "text/event-stream; charset=utf-8"
WAITING = b": waiting\n\n"
"""A comment, which keeps a stream open that has nothing to say yet."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The arguments of one generation."""

    model: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None
    """None: until the context is full."""
    caller: Caller = field(default_factory=current_caller)
    request_id: str = field(default_factory=current_request_id)
    keep_alive_s: float | None = None
    """How long a model that is loaded for this stays; None: as configured."""

    @property
    def arguments(self) -> tuple[str, Prompt, Sampling, int | None, Caller, str, float | None]:
        """As `Node.generate` takes them."""
        asked = self.model, self.prompt, self.sampling, self.max_tokens
        return *asked, self.caller, self.request_id, self.keep_alive_s


class Reply(Protocol):
    """How one API words one answer. A whole answer is `full`; a stream is `first`, `text` ..., then `last` or
    `error`."""

    @property
    def stream_type(self) -> str:
        """Content type of the stream."""
        ...

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes: ...

    def first(self, generation: Generation | None) -> bytes:
        """None where the stream begins before the generation."""
        ...

    def text(self, text_delta: TextDelta) -> bytes: ...

    def waiting(self) -> bytes:
        """A sign of life that changes nothing."""
        ...

    def last(self, generation: Generation) -> bytes: ...

    def error(self, error: SwarmLLMError) -> bytes: ...


async def answer(request: GenerationRequest, reply: Reply, *, stream: bool) -> Response:
    return await (_streamed(request, reply) if stream else _whole(request, reply))


async def _whole(request: GenerationRequest, reply: Reply) -> Response:
    """A client that leaves cancels this task, and with it the generation."""
    with plain_errors():
        async with current_node().generate(*request.arguments) as generation:
            text_delta = TextDelta.of([piece async for piece in generation], generation.prompt)
    response = Response(reply.full(text_delta, generation), content_type="application/json")
    response.headers.update(swarm_headers(generation))
    return response


async def _streamed(request: GenerationRequest, reply: Reply) -> Response:
    node = current_node()
    buffer = start_request_task(BufferedGeneration(node.generate(*request.arguments)))

    def loading() -> str:
        provisioning = node.provisioner.of(request.model)
        return provisioning.text if provisioning is not None else ""

    with trio.move_on_after(HEADERS_AFTER_S):
        while not await buffer.wait(PROGRESS_EVERY_S) and not loading():
            pass
    if buffer.error is not None:
        raise buffer.error
    return stream_response(_events(buffer, reply, loading), reply, buffer)


def stream_response(events: AsyncIterator[bytes], reply: Reply, buffer: BufferedGeneration) -> Response:
    response = Response(events, content_type=reply.stream_type)
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    if buffer.generation is not None:
        response.headers.update(swarm_headers(buffer.generation))
    return response


async def _events(
    buffer: BufferedGeneration, reply: Reply, loading: Callable[[], str]
) -> AsyncIterator[bytes]:
    """`loading`: how far the model is that is loaded for this; empty: it is there. Nothing here may wait in a
    `finally`: a client that leaves closes this generator in passing."""
    waiting = [reply.first(buffer.generation)]
    if buffer.generation is None:
        # A client has waited already, and a proxy may be waiting for the first byte.
        yield waiting.pop()
    while True:
        how_far = loading()
        text_delta = await buffer.take(PROGRESS_EVERY_S if how_far else WAITING_EVERY_S)
        if text_delta is None:
            is_commented = how_far and reply.stream_type == EVENT_STREAM
            waiting.append(f": {how_far}\n\n".encode() if is_commented else reply.waiting())
        elif text_delta:
            waiting.append(reply.text(text_delta))
        if buffer.finished and not buffer.has_pieces:
            break
        yield b"".join(waiting)
        waiting.clear()
    if buffer.error is not None:
        waiting.append(reply.error(buffer.error))
    elif buffer.generation is not None:
        waiting.append(reply.last(buffer.generation))
    yield b"".join(waiting)
