"""Runs several generations as one HTTP response: `n` choices of a prompt, or several prompts.

Each choice is a generation with a turn of its own, so none holds what another one waits for. The others of
a prompt begin when its first one has its first token: by then a worker has the prompt's KV and gives it to
them, and the prompt is computed once. The usage counts it once, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

import msgspec
import trio
from quart import Response

from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import plain_errors
from swarmllm.api.http.request_tasks import start_request_task
from swarmllm.api.output.buffered_generation import MIN_FLUSH_INTERVAL_S, BufferedGeneration, TextDelta
from swarmllm.api.output.response import (
    HEADERS_AFTER_S,
    WAITING_EVERY_S,
    GenerationRequest,
    Reply,
    answer,
    stream_response,
)
from swarmllm.api.output.swarm_report import swarm_headers
from swarmllm.node import Node
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.request import further_id

Json = dict[str, object]


class ChoiceReply(Reply, Protocol):
    """A Reply that can also be one choice of several."""

    def choice(self, text_delta: TextDelta, generation: Generation) -> Json: ...

    def body(self, choices: list[Json], usage: Json, generation: Generation) -> bytes: ...

    def finish(self, generation: Generation) -> bytes:
        """The last chunk of this choice."""
        ...

    def end(self, usage: Json) -> bytes:
        """After the last chunk of the last choice."""
        ...


def usage(*generations: Generation, n: int = 0) -> Json:
    """Of all choices together; each `n` of them have one prompt, 0: all."""
    firsts = generations[:: n or len(generations)]
    n_prompt_tokens = sum(generation.n_prompt_tokens for generation in firsts)
    n_generated = sum(generation.n_generated for generation in generations)
    n_right = sum(generation.guesses.right for generation in generations)
    n_wrong = sum(generation.guesses.checked for generation in generations) - n_right
    return {
        "prompt_tokens": n_prompt_tokens,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt_tokens + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(generation.n_cached_tokens for generation in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": n_right,
            "rejected_prediction_tokens": n_wrong,
        },
    }


async def answer_choices(
    requests: Sequence[GenerationRequest], replies: Sequence[ChoiceReply], *, stream: bool
) -> Response:
    """`asks`: one per prompt; `replies`: as many for each, prompt by prompt."""
    if len(replies) == 1:
        return await answer(requests[0], replies[0], stream=stream)
    n = len(replies) // len(requests)
    choices = [_of_choice(request, index) for request in requests for index in range(n)]
    return await (_streamed if stream else _whole)(choices, replies, n)


def _of_choice(request: GenerationRequest, index: int) -> GenerationRequest:
    """A seed makes an answer repeatable, not all choices the same."""
    if index:
        request = replace(request, request_id=further_id(request.request_id))
    if request.sampling.seed is None:
        return request
    seed = (request.sampling.seed + index) % 2**32
    return replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


async def _whole(requests: Sequence[GenerationRequest], replies: Sequence[ChoiceReply], n: int) -> Response:
    node = current_node()
    done: dict[int, tuple[TextDelta, Generation]] = {}
    first_token = [trio.Event() for _ in requests[::n]]

    async def run(index: int) -> None:
        if index % n:
            await first_token[index // n].wait()
        async with node.generate(*requests[index].arguments) as generation:
            first_token[index // n].set()
            pieces = [piece async for piece in generation]
            done[index] = TextDelta.of(pieces, generation.prompt), generation

    with plain_errors():
        async with trio.open_nursery() as nursery:
            for index in range(len(requests)):
                nursery.start_soon(run, index)
    generations = [done[index][1] for index in range(len(requests))]
    choices = [reply.choice(*done[index]) for index, reply in enumerate(replies)]
    body = replies[0].body(choices, usage(*generations, n=n), generations[0])
    response = Response(body, content_type="application/json")
    response.headers.update(swarm_headers(generations[0]))
    return response


async def _streamed(
    requests: Sequence[GenerationRequest], replies: Sequence[ChoiceReply], n: int
) -> Response:
    node = current_node()
    changed = trio.lowlevel.ParkingLot()
    buffers: list[BufferedGeneration] = []
    for index, request in enumerate(requests):
        if index % n:
            generating = _after_first(buffers[index - index % n], node, request)
        else:
            generating = node.generate(*request.arguments)
        buffers.append(start_request_task(BufferedGeneration(generating, changed)))
    first = buffers[0]
    await first.wait(HEADERS_AFTER_S)
    if first.error is not None:
        for buffer in buffers:
            buffer.stop()
        raise first.error
    return stream_response(_events(buffers, changed, replies, n), replies[0], first)


@asynccontextmanager
async def _after_first(
    first: BufferedGeneration, node: Node, request: GenerationRequest
) -> AsyncIterator[Generation]:
    await first.started.wait()
    async with node.generate(*request.arguments) as generation:
        yield generation


async def _events(
    buffers: Sequence[BufferedGeneration],
    changed: trio.lowlevel.ParkingLot,
    replies: Sequence[ChoiceReply],
    n: int,
) -> AsyncIterator[bytes]:
    """Nothing here may wait in a `finally`, see `response._events`."""
    open_buffers = dict(enumerate(buffers))
    pieces = [reply.first(buffer.generation) for buffer, reply in zip(buffers, replies, strict=True)]
    while open_buffers:
        for index, buffer in list(open_buffers.items()):
            text_delta = buffer.collect()
            if text_delta:
                pieces.append(replies[index].text(text_delta))
            if buffer.error is not None:
                for other in buffers:
                    other.stop()
                yield b"".join([*pieces, replies[index].error(buffer.error)])
                return
            if buffer.finished and buffer.generation is not None:
                pieces.append(replies[index].finish(buffer.generation))
                del open_buffers[index]
        yield b"".join(pieces)
        pieces.clear()
        if open_buffers and not await _wait(open_buffers.values(), changed):
            pieces.append(replies[0].waiting())
    generations = [buffer.generation for buffer in buffers if buffer.generation is not None]
    yield replies[0].end(usage(*generations, n=n))


async def _wait(buffers: Collection[BufferedGeneration], changed: trio.lowlevel.ParkingLot) -> bool:
    """Whether one of them has something to tell before the reader's next sign of life is due."""
    with trio.move_on_after(WAITING_EVERY_S):
        while not any(buffer.has_changed for buffer in buffers):
            await changed.park()
        await trio.sleep(MIN_FLUSH_INTERVAL_S)
        return True
    return False
