"""Stages sign for the rows that they got and sent: who shows one thing to its neighbour and another to the
origin is out of all routes, and nobody can say that it got what it did not get.

Liars do their work and change what they say of it, or change what they send and say the truth of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import LIAR, A, B, C, D, H, I, J, M, N
from trio.testing import MockClock

from bench.common.arithmetic import N_EMBD, FakePool, uncut
from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.commitments import Commitments
from swarmllm.pipeline.check.statements import Statements
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.requests import Attempt
from swarmllm.pipeline.route.newcomers import Newcomers
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.row_committer import RowCommitter
from swarmllm.swarm.in_memory.signer import in_memory_signature
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm_proto.codec import decode_job, decode_request, decode_response, encode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.row_commitments import signed
from swarmllm_proto.swarm import (
    FetchRows,
    LayerForward,
    PipelineError,
    RowsCommitment,
    RowsPiece,
)
from swarmllm_proto.tensors import decode_tensor, tensor_bytes

from .fakes import Swarm, computes, open_swarm

PROMPT = "who has signed for the rows that went from one node to the next one? " * 2
N_TOKENS = 40
UNCHECKED = PipelineSettings(prefill_chunk_tokens=40)
ALWAYS = PipelineSettings(prefill_chunk_tokens=40, check_rate=1.0)
Change = Callable[[str, RowsCommitment], RowsCommitment | None]
"""(receiver, what is true) -> what it is told; None: nothing."""


async def ask(swarm: Swarm, turn: int = 0) -> None:
    prompt = f"{turn} {PROMPT}"
    with trio.fail_after(600):
        async with swarm[A].pipelines.generate(
            Prompt(text=prompt), swarm.entry, Sampling(max_tokens=N_TOKENS)
        ) as generation:
            text = "".join([piece.text async for piece in generation])
    assert text == await uncut(prompt, N_TOKENS)


async def prefer(swarm: Swarm, liked: str, *others: str) -> None:
    said = {liked: computes(swarm.entry.model_id, 1e-6)}
    said |= {other: computes(swarm.entry.model_id, 1.0) for other in others}
    await swarm.tell(A, said)


def forget_doubts(swarm: Swarm, node_id: str) -> None:
    """Its next requests may lead over that node again, also if it is a newcomer."""
    suspects = swarm[A].pipelines._suspects
    suspects._doubts.pop(node_id, None)
    suspects.newcomers = Newcomers()


def count(swarm: Swarm, node_id: str, event: TrustEvent) -> int:
    return swarm[A].trust.count(node_id, event)


def earn(swarm: Swarm, *node_ids: str) -> None:
    """Eleven answers ago they were strangers."""
    for _ in range(12):
        for node_id in node_ids:
            swarm[A].trust.note(node_id, TrustEvent.SERVED)


def pipelines_with(swarm: Swarm, node_id: str) -> Counter[str]:
    """How many of A's pipelines have a node in them from now on. (Checks may ask it to compute.)"""
    requests, counts = swarm[A].pipelines._requests, Counter[str]()
    real = requests.closed

    def closed(attempt: Attempt) -> None:
        counts["all"] += 1
        counts["with it"] += node_id in attempt.assembly.node_ids
        real(attempt)

    requests.closed = closed  # type: ignore[method-assign]
    return counts


def pipeline_of(swarm: Swarm, node_id: str, request_id: str) -> bytes:
    session: Any = swarm[node_id].pipelines._sessions.by_request[request_id]
    pipeline: bytes = session.row_committer._pipeline
    return pipeline


def say(swarm: Swarm, node_id: str, change: Change, *, signs: bool = True) -> list[RowsCommitment]:
    """What a node says of its rows. All that it would have said."""
    router, send = swarm[node_id].router, swarm[node_id].router.send
    true: list[RowsCommitment] = []

    async def lie(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, RowsCommitment):
            true.append(message)
            changed = change(receiver, message)
            if changed is None:
                return
            if signs:
                pipeline = pipeline_of(swarm, node_id, message.request_id)
                changed = signed(changed, pipeline, lambda text: in_memory_signature(node_id, text))
            header, payload = encode_job(changed)
        await send(receiver, header, payload)

    router.send = lie  # type: ignore[method-assign]
    return true


def send(swarm: Swarm, node_id: str, twist: Callable[[np.ndarray], np.ndarray]) -> None:
    """Other rows than its worker keeps."""
    router, real = swarm[node_id].router, swarm[node_id].router.send

    async def lie(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and message.step == "layer":
            rows = twist(decode_tensor(payload)).astype(np.float32)
            header, payload = encode_job(
                msgspec.structs.replace(message, n_tokens=len(rows)), tensor_bytes(rows)
            )
        await real(receiver, header, payload)

    router.send = lie  # type: ignore[method-assign]


def other(digests: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in digests)


def pools(**more: FakePool) -> dict[str, FakePool]:
    return {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), N: FakePool("4:8")}


def tails(*node_ids: str) -> dict[str, FakePool]:
    return {node_id: FakePool("8:12") for node_id in node_ids}


async def twenty(swarm: Swarm, *honest: str) -> Counter[str]:
    """Requests, whatever comes of the first ones. Of the last ten, those with the liar."""
    seen: Counter[str] = Counter()
    for turn in range(20):
        if turn == 10:
            seen = pipelines_with(swarm, LIAR)
        try:
            with trio.fail_after(600):
                async with swarm[A].pipelines.generate(
                    Prompt(text=f"{turn} {PROMPT}"), swarm.entry, Sampling(max_tokens=N_TOKENS)
                ) as generation:
                    assert [piece async for piece in generation]
        except SwarmLLMError:
            assert turn < 10, "only the first ones may fail"
        await trio.sleep(2)
    assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in honest)
    assert all(count(swarm, node_id, TrustEvent.WRONG_RESULT) == 0 for node_id in honest)
    assert seen["all"] >= 10
    return seen


@pytest.mark.parametrize("by_links", [False, True])
async def test_honest_stages_sign_for_every_row_and_nobody_loses_anything(
    by_links: bool, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says of the rows between two stages what the other says, in the prompt and in the answer.
    `by_links`: their daemons do not see the rows of the answer, and the workers tell of none."""
    computed = RowCommitter.computed

    def seen(row_committer: RowCommitter, stage: int, position: int, n_rows: int) -> None:
        if position < row_committer._context.n_prompt_tokens or not by_links:
            computed(row_committer, stage, position, n_rows)

    monkeypatch.setattr(RowCommitter, "computed", seen)
    opened, begun = Commitments.opened, list[tuple[Statements | None, Chain]]()

    def recorded(commitments: Commitments, attempt: Attempt, chain: Chain) -> None:
        opened(commitments, attempt, chain)
        begun.append((attempt.statements, chain))

    monkeypatch.setattr(Commitments, "opened", recorded)
    async with open_swarm(pools() | tails(H), settings=UNCHECKED, committing=None) as swarm:
        for turn in range(20):
            await ask(swarm, turn)
            statements, chain = begun[-1]
            assert statements is not None
            ledger = statements.ledger
            assert len(chain.computed_tokens) > 5 * 32
            for stage in range(2):
                with trio.fail_after(DEADLINE_S):
                    await statements.wait_for(partial(ledger.is_agreed, stage, 0, len(chain.computed_tokens)))
                assert ledger.is_agreed(stage, 0, len(chain.computed_tokens))
        counts = [swarm[A].trust.explain(node_id).counts for node_id in (LIAR, M, N, H)]
        assert all(each.keys() <= {"served"} for each in counts)
        assert swarm[H].trust.explain(LIAR).counts == {}
        await swarm.quiet()


@pytest.mark.parametrize(("old", "n_with_it"), [(A, 3), (LIAR, 0), (H, 3)])
async def test_nodes_that_do_not_know_of_it_take_part_where_they_are_needed(
    old: str, n_with_it: int, patient_clock: MockClock
) -> None:
    nodes = pools() | tails(H)
    async with open_swarm(nodes, settings=UNCHECKED, committing=nodes.keys() - {old}) as swarm:
        await prefer(swarm, LIAR, M, N)
        seen = pipelines_with(swarm, old)
        for turn in range(3):
            await ask(swarm, turn)
        assert seen["with it"] == n_with_it
        for here in nodes:
            for there in nodes:
                assert swarm[here].trust.explain(there).counts.keys() <= {"served", "checked"}
        await swarm.quiet()


def zeros(rows: np.ndarray) -> np.ndarray:
    return np.zeros_like(rows)


async def test_who_signs_for_one_thing_here_and_another_there_is_out_after_one_request(
    patient_clock: MockClock,
) -> None:
    """The next stage has the liar's signature for what it got."""
    async with open_swarm(pools() | tails(H), settings=UNCHECKED, committing=None) as swarm:
        await prefer(swarm, LIAR, M, N)
        # Its worker has the truth, which the origin is told; the next stage is told what it gets.
        say(swarm, LIAR, lambda receiver, true: true if receiver == A else as_zeros(true))
        send(swarm, LIAR, zeros)
        seen = await twenty(swarm, M, N, H)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert count(swarm, H, TrustEvent.DISPUTED) == 0
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        assert seen["with it"] == 0
        swarm.kill(LIAR)
        await ask(swarm, 99)
        await swarm.quiet()


def as_zeros(true: RowsCommitment) -> RowsCommitment:
    from swarmllm.pipeline.stage.row_committer import digests_of

    return msgspec.structs.replace(true, sent=digests_of(np.zeros((true.n_rows, N_EMBD), np.float32)))


async def test_who_shows_the_truth_to_the_origin_and_other_rows_to_its_neighbour_is_out_of_all_routes(
    patient_clock: MockClock,
) -> None:
    """Nobody has a signature for what it sent. It contradicts each of its neighbours, and they only it."""
    last = (H, I, J, B, C, D)
    async with open_swarm(pools() | tails(*last), settings=UNCHECKED, committing=None) as swarm:
        earn(swarm, *last)
        send(swarm, LIAR, zeros)
        for turn in range(6):
            await prefer(swarm, LIAR, M, N)
            forget_doubts(swarm, LIAR)
            await ask(swarm, turn) if swarm[A].trust.score(LIAR) < WORK_MIN else await tolerate(swarm, turn)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        seen = await twenty(swarm, M, N, *last)
        assert seen["with it"] == 0
        swarm.kill(LIAR)
        await ask(swarm, 99)
        await swarm.quiet()


async def tolerate(swarm: Swarm, turn: int) -> None:
    """An answer may rest on the liar's rows until it is known."""
    async with swarm[A].pipelines.generate(
        Prompt(text=f"{turn} {PROMPT}"), swarm.entry, Sampling(max_tokens=N_TOKENS)
    ) as generation:
        assert [piece async for piece in generation]
    await trio.sleep(1)


async def test_the_same_among_strangers_costs_no_honest_node_and_routes_do_without_the_liar(
    patient_clock: MockClock,
) -> None:
    async with open_swarm(pools() | tails(H, I), settings=UNCHECKED, committing=None) as swarm:
        await prefer(swarm, LIAR, M, N)
        send(swarm, LIAR, zeros)
        seen = await twenty(swarm, M, N, H, I)
        assert count(swarm, LIAR, TrustEvent.DISPUTED) >= 1
        assert seen["with it"] == 0
        swarm.kill(LIAR)
        await ask(swarm, 99)


async def test_who_says_that_it_got_other_rows_gains_nothing(patient_clock: MockClock) -> None:
    """An honest node is contradicted once, and then routes do without the liar. Several have been, and it is
    out."""
    first = (M, N, H, I)
    nodes = {A: FakePool("0:4"), LIAR: FakePool("8:12"), J: FakePool("8:12"), B: FakePool("8:12")}
    nodes |= {node_id: FakePool("4:8") for node_id in first}
    async with open_swarm(nodes, settings=UNCHECKED, committing=None) as swarm:
        earn(swarm, *first, J, B)
        say(swarm, LIAR, lambda _, true: msgspec.structs.replace(true, received=other(true.received)))
        for turn in range(8):
            await prefer(swarm, LIAR, J, B)
            forget_doubts(swarm, LIAR)
            await tolerate(swarm, turn)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        seen = await twenty(swarm, *first, J, B)
        assert seen["with it"] == 0
        swarm.kill(LIAR)
        await ask(swarm, 99)


async def test_new_identities_cannot_outvote_a_node(patient_clock: MockClock) -> None:
    """Strangers say one after the other that they got other rows from it."""
    liars = (H, I, J, B, C)
    nodes = {A: FakePool("0:4"), M: FakePool("4:8")} | tails(*liars, D)
    async with open_swarm(nodes, settings=UNCHECKED, committing=None) as swarm:
        for liar in liars:
            say(swarm, liar, lambda _, true: msgspec.structs.replace(true, received=other(true.received)))
        for turn in range(10):
            forget_doubts(swarm, M)
            with suppress(RemoteError):  # Both attempts at a request may lead over liars.
                await tolerate(swarm, turn)
        assert count(swarm, M, TrustEvent.DISPUTED) >= 3
        assert count(swarm, M, TrustEvent.WRONG_RESULT) == 0
        assert swarm[A].trust.score(M) >= NEUTRAL


async def test_what_the_origin_itself_gets_is_compared_with_the_signature(patient_clock: MockClock) -> None:
    nodes = {A: FakePool("0:4", "8:12"), LIAR: FakePool("4:8"), M: FakePool("4:8")}
    async with open_swarm(nodes, settings=UNCHECKED, committing=None) as swarm:
        await prefer(swarm, LIAR, M)
        send(swarm, LIAR, zeros)
        await twenty(swarm, M)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert swarm[A].trust.score(LIAR) < WORK_MIN


def deny(swarm: Swarm, node_id: str, change: Callable[[RowsPiece], RowsPiece]) -> None:
    node = swarm[node_id]
    real = node.pipelines.on_request

    async def answer(sender: str, body: bytes) -> bytes:
        request, answered = decode_request(body), await real(sender, body)
        if isinstance(request, FetchRows):
            piece = decode_response(answered)
            assert isinstance(piece, RowsPiece)
            return msgspec.msgpack.encode(change(piece))
        return answered

    node.router.serve(answer, node.pipelines.on_message)


def zeroed(piece: RowsPiece) -> RowsPiece:
    return msgspec.structs.replace(piece, rows=memoryview(bytes(len(piece.rows))), digest=bytes(32))


@pytest.mark.parametrize("layers", ["4:8", "8:12"])
async def test_who_shows_other_rows_than_it_has_signed_for_is_wrong_at_once(
    layers: str, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check begins with what the stages say that they sent and got; the honest stage that is checked, and
    the one before the liar, lose nothing."""
    nodes = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), N: FakePool("4:8")}
    nodes |= {I: FakePool("8:12"), LIAR: FakePool(layers)}
    monkeypatch.setattr("swarmllm.pipeline.check.checker.Checker.draws", lambda self, context, is_whole: 1)
    async with open_swarm(nodes, settings=ALWAYS, committing=None) as swarm:
        await prefer(swarm, LIAR, *((M, N) if layers == "4:8" else (H, I)))
        deny(swarm, LIAR, zeroed)
        for turn in range(6):
            if count(swarm, LIAR, TrustEvent.WRONG_RESULT):
                break
            await ask(swarm, turn)
            await trio.sleep(40)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        honest = [node_id for node_id in nodes if node_id not in (A, LIAR)]
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in honest)
        assert all(count(swarm, node_id, TrustEvent.DISPUTED) == 0 for node_id in honest)


async def test_who_signs_for_nothing_is_left(patient_clock: MockClock) -> None:
    """It announces that it does."""
    async with open_swarm(pools() | tails(H), settings=ALWAYS, committing=None) as swarm:
        await prefer(swarm, LIAR, M, N)
        say(swarm, LIAR, lambda receiver, true: None)
        seen = await twenty(swarm, M, N, H)
        assert count(swarm, LIAR, TrustEvent.DISPUTED) >= 1
        assert seen["with it"] == 0


# Rows that no layer computes.


def not_numbers(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[-1, 0] = np.nan
    return rows


@pytest.mark.parametrize("says", ["nothing", "the truth of what it sent", "what it should have sent"])
async def test_the_sender_of_rows_that_are_no_numbers_is_charged(says: str, patient_clock: MockClock) -> None:
    changes: Mapping[str, Change] = {
        "nothing": lambda receiver, true: None,
        "the truth of what it sent": lambda receiver, true: with_last_row_broken(true),
        "what it should have sent": lambda receiver, true: true,
    }
    last = (H, I, J, B)
    whole = PipelineSettings(prefill_chunk_tokens=64)
    async with open_swarm(pools() | tails(*last), settings=whole, committing=None) as swarm:
        earn(swarm, *last)
        sent = remember_rows(swarm, LIAR)
        BROKEN[:] = [sent]
        say(swarm, LIAR, changes[says])
        send(swarm, LIAR, not_numbers)
        for turn in range(8):
            await prefer(swarm, LIAR, M, N)
            forget_doubts(swarm, LIAR)
            await ask(swarm, turn)
            await trio.sleep(4)
        assert swarm[A].trust.score(LIAR) < NEUTRAL
        if says != "nothing":
            assert swarm[A].trust.score(LIAR) < WORK_MIN
        if says == "the truth of what it sent":
            assert count(swarm, LIAR, TrustEvent.BAD_NUMBERS) >= 1
            assert all(count(swarm, node_id, TrustEvent.DISPUTED) == 0 for node_id in last)
        seen = await twenty(swarm, M, N, *last)
        assert seen["with it"] <= 1
        swarm.kill(LIAR)
        await ask(swarm, 99)
        await swarm.quiet()


BROKEN: list[dict[int, np.ndarray]] = []


def remember_rows(swarm: Swarm, node_id: str) -> dict[int, np.ndarray]:
    """By position, what a node sent in its newest request."""
    rows_at: dict[int, np.ndarray] = {}
    router, real = swarm[node_id].router, swarm[node_id].router.send

    async def note(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and message.step == "layer":
            if message.position == 0:
                rows_at.clear()
            for index, row in enumerate(decode_tensor(payload)):
                rows_at[message.position + index] = row
        await real(receiver, header, payload)

    router.send = note  # type: ignore[method-assign]
    return rows_at


def with_last_row_broken(true: RowsCommitment) -> RowsCommitment:
    from swarmllm.pipeline.stage.row_committer import digests_of

    rows_at = BROKEN[0]
    rows = [rows_at.get(at) for at in range(true.position, true.position + true.n_rows)]
    if any(row is None for row in rows):
        return true
    return msgspec.structs.replace(true, sent=digests_of(np.stack([row for row in rows if row is not None])))


async def test_who_refuses_rows_that_were_good_gains_nothing(patient_clock: MockClock) -> None:
    """It names the one before it, which has signed for what it sent."""
    first = (M, N, H, I)
    nodes = {A: FakePool("0:4"), LIAR: FakePool("8:12"), J: FakePool("8:12"), B: FakePool("8:12")}
    nodes |= {node_id: FakePool("4:8") for node_id in first}
    async with open_swarm(nodes, settings=UNCHECKED, committing=None) as swarm:
        earn(swarm, *first, J, B)
        node = swarm[LIAR]

        async def accuse(sender: str, header: bytes, payload: memoryview) -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward):
                error = PipelineError(request_id=message.request_id, node_id=sender, kind="bad_rows")
                await node.router.send(A, *encode_job(error))
            await node.pipelines.on_message(sender, header, payload)

        node.router.serve(node.pipelines.on_request, accuse)
        for turn in range(8):
            await prefer(swarm, LIAR, J, B)
            forget_doubts(swarm, LIAR)
            await ask(swarm, turn)
            await trio.sleep(4)
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (*first, J, B))


# What is refused.


def far_rows(true: RowsCommitment) -> RowsCommitment:
    return msgspec.structs.replace(true, position=true.position + 32 * 1000)


def anothers(true: RowsCommitment) -> RowsCommitment:
    return msgspec.structs.replace(true, stage=0)


@pytest.mark.parametrize(
    ("change", "signs"),
    [
        (lambda true: msgspec.structs.replace(true, sent=other(true.sent)), False),
        (lambda true: msgspec.structs.replace(true, signature=bytes(64)), False),
        (far_rows, True),
        (anothers, True),
        (lambda true: msgspec.structs.replace(true, sent=b""), True),
    ],
    ids=["forged", "unsigned", "rows that there are not", "of another stage", "without rows"],
)
async def test_what_nobody_honest_says_is_charged_to_its_sender(
    change: Callable[[RowsCommitment], RowsCommitment], signs: bool, patient_clock: MockClock
) -> None:
    async with open_swarm(pools() | tails(H), settings=UNCHECKED, committing=None) as swarm:
        # By the real clock twenty requests are over before the protocol may be broken a second time.
        swarm[A].trust._clock = trio.current_time
        await prefer(swarm, LIAR, M, N)
        say(swarm, LIAR, lambda receiver, true: change(true), signs=signs)
        for turn in range(20):
            await ask(swarm, turn)
            await trio.sleep(4)
        assert count(swarm, LIAR, TrustEvent.BROKE_PROTOCOL) >= 2
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N, H))
        assert swarm[H].trust.score(LIAR) < NEUTRAL
        swarm.kill(LIAR)
        await ask(swarm, 99)


async def test_what_was_signed_for_another_request_is_charged_to_its_sender(
    patient_clock: MockClock,
) -> None:
    async with open_swarm(pools() | tails(H), settings=UNCHECKED, committing=None) as swarm:
        await prefer(swarm, LIAR, M, N)
        old: list[RowsCommitment] = []

        def replayed(receiver: str, true: RowsCommitment) -> RowsCommitment:
            old.append(true)
            return msgspec.structs.replace(old[0], request_id=true.request_id)

        say(swarm, LIAR, replayed, signs=False)
        for turn in range(3):
            await ask(swarm, turn)
            await trio.sleep(4)
        assert count(swarm, LIAR, TrustEvent.BROKE_PROTOCOL) >= 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N, H))


async def test_who_has_no_part_in_a_request_says_nothing_of_it(patient_clock: MockClock) -> None:
    nodes = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), LIAR: FakePool()}
    async with open_swarm(nodes, settings=UNCHECKED, committing=None) as swarm:

        async def intrude(position: int, layers: object) -> None:
            for chain in swarm[A].pipelines._requests.chains():
                said = RowsCommitment(
                    request_id=chain.context.request_id,
                    stage=1,
                    position=0,
                    n_rows=32,
                    sent=bytes(32),
                    signature=bytes(64),
                )
                for receiver in (A, H):
                    await swarm[LIAR].router.send(receiver, *encode_job(said))

        nodes[H].before_forward = intrude
        await ask(swarm)
        await swarm.quiet()
        assert swarm[A].trust.score(LIAR) < NEUTRAL
        assert swarm[H].trust.score(LIAR) < NEUTRAL
        assert swarm[A].trust.score(M) > NEUTRAL
