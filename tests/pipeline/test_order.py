"""Order and lateness are nobody's fault: what comes early waits, what comes twice is dropped."""

from __future__ import annotations

import random

import pytest
import trio
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.output import EARLY_TOKENS_MAX, EarlyTokens, InvalidReport
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import StreamingToken

from .fakes import Swarm, open_swarm

PROMPT = "what comes first?"


async def ask(swarm: Swarm, n_tokens: int = 12) -> str:
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=n_tokens)
        ) as generation:
            return "".join([piece.text async for piece in generation])


def shuffle_tokens(swarm: Swarm, node_id: str, rng: random.Random, n_held: int) -> None:
    """Tokens that `node_id` sends to the origin are held until there are `n_held`, and leave in any order."""
    router, send = swarm[node_id].router, swarm[node_id].router.send
    held: list[tuple[str, bytes, bytes | memoryview]] = []

    async def out_of_order(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if not isinstance(message, StreamingToken) or message.index == 0:
            await send(receiver, header, payload)
            return
        held.append((receiver, header, payload))
        if len(held) >= n_held or message.finish_reason:
            rng.shuffle(held)
            while held:
                await send(*held.pop())

    router.send = out_of_order  # type: ignore[method-assign]


@pytest.mark.parametrize("n_held", [2, 3, 8])
async def test_tokens_that_overtake_each_other_are_read_in_order(n_held: int) -> None:
    """As where some go by links and some by daemons. The origin holds no stage: the ring does not wait."""
    pools = {A: FakePool(), B: FakePool("0:6"), C: FakePool("6:12")}
    async with open_swarm(pools) as swarm:
        shuffle_tokens(swarm, C, random.Random(n_held), n_held)
        for _ in range(20):
            assert await ask(swarm) == await uncut(PROMPT, 12)
        for other in (B, C):
            assert swarm[A].trust.score(other) > NEUTRAL
        await swarm.quiet()


@pytest.mark.parametrize("ahead", [EARLY_TOKENS_MAX + 1, 2**31 - 2])
async def test_tokens_far_beyond_the_window_are_no_matter_of_order(ahead: int) -> None:
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    async with open_swarm(pools) as swarm:
        router, send = swarm[B].router, swarm[B].router.send

        async def skip(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, StreamingToken):
                far = StreamingToken(request_id=message.request_id, index=ahead, token=1)
                header, payload = encode_job(far, payload)
            await send(receiver, header, payload)

        router.send = skip  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="broke the protocol"):
            await ask(swarm, n_tokens=3000)


async def test_tokens_that_never_fill_the_gap_are_no_progress(patient_clock: MockClock) -> None:
    """A stage that goes on telling what is ahead of a missing token does not hold its client for ever."""
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    async with open_swarm(pools) as swarm:
        router, send = swarm[B].router, swarm[B].router.send

        async def ahead_for_ever(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if not isinstance(message, StreamingToken):
                await send(receiver, header, payload)
                return
            for _ in range(100):
                early = StreamingToken(request_id=message.request_id, index=message.index + 1, token=1)
                await send(receiver, *encode_job(early, b"x"))
                await trio.sleep(4)

        router.send = ahead_for_ever  # type: ignore[method-assign]
        began_s = trio.current_time()
        with pytest.raises(SwarmLLMError):
            async with swarm[A].pipelines.generate(
                Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=12)
            ) as generation:
                _ = [piece.text async for piece in generation]
        assert trio.current_time() - began_s < 2 * 120 + 20


@given(st.permutations(range(12)))
def test_whatever_the_order_of_arrival_all_are_given_in_theirs(order: list[int]) -> None:
    early, given_out, due = EarlyTokens[int](), list[int](), 0
    for index in order:
        early.put(index, index, 1, due)
        while (token := early.take(due)) is not None:
            given_out.append(token)
            due += 1
    assert given_out == list(range(12))


def test_what_waits_is_bounded_in_number_and_bytes() -> None:
    early = EarlyTokens[bytes]()
    with pytest.raises(InvalidReport, match="ahead"):
        early.put(EARLY_TOKENS_MAX + 2, b"", 0, 1)
    early.put(3, b"", 2**20, 1)
    with pytest.raises(InvalidReport, match="bytes"):
        early.put(4, b"", 1, 1)
    early.put(3, b"again", 2**20, 1)
    assert early.take(3) == b""
    early.put(4, b"", 1, 1)
