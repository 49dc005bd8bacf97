"""What other nodes computed is computed again: a liar loses its work, no honest node its trust.

The liar's rows are really computed, and really wrong. In `LyingPool` its own record has what it sent; where
only the message is changed, its record has the truth, and it denies what the next stage got."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from trio.testing import MockClock

from bench.common.arithmetic import PRIME, FakePool, uncut
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.checker import Checker
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm_proto.codec import decode_job, decode_request, decode_response, encode_job, encode_request
from swarmllm_proto.ipc import Sampling, Token
from swarmllm_proto.swarm import FetchRows, LayerForward, RowsPiece, StreamingToken
from swarmllm_proto.tensors import Tensor, decode_tensor, tensor_bytes

from .fakes import Swarm, computes, open_swarm

PROMPT = "what would another node say to these rows? " * 2
N_TOKENS = 12
A, B, C, H, LIAR, M, N = (node_id_named(name) for name in ("a", "b", "c", "h", "liar", "m", "n"))
ALWAYS = PipelineSettings(check_rate=1.0, prefill_chunk_tokens=40)
Twist = Callable[[Tensor, Tensor], Tensor]
"""(what came in, what comes of it) -> what is sent instead."""


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first of these nodes that has a stage is checked; of other pipelines any stage."""
    wanted: list[str] = [LIAR, M]
    draws = Checker.draws

    def draw(self: Checker, context: RequestContext, *, is_whole: bool) -> int | None:
        node_ids = [stage.node_id for stage in context.view.stages]
        found = [node_id for node_id in wanted if node_id in node_ids]
        return (
            node_ids.index(found[0])
            if found and self.settings.check_rate
            else draws(self, context, is_whole=is_whole)
        )

    monkeypatch.setattr(Checker, "draws", draw)
    return wanted


class LyingPool(FakePool):
    def __init__(self, layers: str, twist: Twist | None = None, *, left_out: int = 0) -> None:
        super().__init__(layers)
        self.twist = twist
        self.left_out = left_out
        """Layers at the end that are not computed."""

    def _run(self, slot: Any, layers: LayerRange, position: int, rows: Tensor) -> Tensor:
        computed = LayerRange(layers.start, layers.end - self.left_out)
        hidden = super()._run(slot, computed, position, rows)
        return hidden if self.twist is None else self.twist(rows, hidden).astype(np.float32)


def noisy(part: float) -> Twist:
    drawn = np.random.default_rng(5)
    return lambda _, rows: rows * (1 + part * drawn.standard_normal(rows.shape))


def replayed() -> Twist:
    """Each row is the one before it."""
    last: list[Tensor] = []

    def twist(_: Tensor, rows: Tensor) -> Tensor:
        moved = np.concatenate((last[-1] if last else rows[:1], rows[:-1]))
        last.append(rows[-1:])
        return moved

    return twist


TWISTS: Mapping[str, Twist] = {
    "zeros": lambda _, rows: np.zeros_like(rows),
    "passed through unchanged": lambda came_in, _: came_in,
    "noise of 15 %": noisy(0.15),
    "one row for all": lambda _, rows: np.ones_like(rows),
    "an older row": replayed(),
    "huge": lambda _, rows: np.full_like(rows, 1e18),
}


_numbers = itertools.count()


async def ask(swarm: Swarm) -> bool:
    """Whether the answer is that of the uncut model. Each prompt is another one from its beginning."""
    prompt = f"{next(_numbers)} {PROMPT}"
    with trio.fail_after(600):
        async with swarm[A].pipelines.generate(
            Prompt(text=prompt), swarm.entry, Sampling(max_tokens=N_TOKENS)
        ) as generation:
            text = "".join([piece.text async for piece in generation])
    return text == await uncut(prompt, N_TOKENS)


async def checked(swarm: Swarm, n_checks: int) -> None:
    """Wait until so many checks have ended."""
    with trio.fail_after(600):
        while True:
            counts = swarm[A].pipelines.statistics()
            if counts.checked + counts.checks_dropped >= n_checks:
                return
            await trio.sleep(0.1)


async def asked_and_checked(swarm: Swarm) -> bool:
    counts = swarm[A].pipelines.statistics()
    is_right = await ask(swarm)
    await checked(swarm, counts.checked + counts.checks_dropped + 1)
    return is_right


async def prefer(swarm: Swarm, liked: str, *others: str) -> None:
    said = {liked: computes(swarm.entry.model_id, 1e-6)}
    said |= {other: computes(swarm.entry.model_id, 1.0) for other in others}
    await swarm.tell(A, said)


def count(swarm: Swarm, node_id: str, event: TrustEvent) -> int:
    return swarm[A].trust.count(node_id, event)


def five(liar: FakePool) -> dict[str, FakePool]:
    return {A: FakePool("0:4"), LIAR: liar, M: FakePool("4:8"), N: FakePool("4:8"), H: FakePool("8:12")}


@pytest.mark.parametrize("name", [*TWISTS, "one layer left out", "the last two layers left out"])
async def test_a_stage_that_sends_other_rows_is_out_of_all_routes(
    name: str, patient_clock: MockClock
) -> None:
    """Two other holders agree, and so the liar is named."""
    left_out = {"one layer left out": 1, "the last two layers left out": 2}.get(name, 0)
    async with open_swarm(
        five(LyingPool("4:8", TWISTS.get(name), left_out=left_out)), settings=ALWAYS
    ) as swarm:
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert trust.score(LIAR) < WORK_MIN
        for _ in range(5):
            assert await ask(swarm)
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (M, N, H))
        swarm.kill(LIAR)
        assert await ask(swarm)
        await swarm.quiet()


async def test_noise_within_the_tolerance_is_seen_and_not_charged(patient_clock: MockClock) -> None:
    """It changes the rows no more than other kernels do."""
    liar = LyingPool("4:8", noisy(0.01))
    async with open_swarm(five(liar), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.CHECKED) == 1
        details = [entry.detail for entry in swarm[A].trust.explain(LIAR).recent]
        assert "within tolerance" in details


async def test_honest_nodes_are_right_with_equal_bits(patient_clock: MockClock) -> None:
    async with open_swarm(five(FakePool("4:8")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        for _ in range(5):
            assert await asked_and_checked(swarm)
        trust, counts = swarm[A].trust, swarm[A].pipelines.statistics()
        assert counts.checked == 5
        assert counts.checks_wrong == counts.checks_disputed == counts.checks_dropped == 0
        explained = trust.explain(LIAR)
        assert explained.counts == {"served": 5, "checked": 5}
        assert {entry.detail for entry in explained.recent if entry.trust_event is TrustEvent.CHECKED} == {
            "equal bits"
        }
        # Who computed for a check was asked as for any request, and knows of none.
        assert all(swarm[A].trust.explain(node_id).counts.keys() <= {"served"} for node_id in (M, N, H))
        await swarm.quiet()


async def test_the_origin_computes_by_itself_what_it_can(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4", "4:8"), LIAR: LyingPool("4:8", TWISTS["zeros"]), H: FakePool("8:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        await prefer(swarm, LIAR)
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert await ask(swarm)
        await swarm.quiet()


async def test_a_check_leaves_slots_for_requests(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4", "4:8"), LIAR: FakePool("4:8"), H: FakePool("8:12")}
    full = PipelineSettings(check_rate=1.0, max_requests_per_model=1)
    async with open_swarm(pools, settings=full) as swarm:
        swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        await prefer(swarm, LIAR)
        assert await asked_and_checked(swarm)
        assert swarm[A].pipelines.statistics().checks_dropped == 1
        await swarm.quiet()


def send_other_rows(swarm: Swarm, node_id: str, twist: Twist) -> None:
    """Its worker keeps the true ones."""
    router, send = swarm[node_id].router, swarm[node_id].router.send

    async def lie(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and message.step == "layer":
            rows = decode_tensor(payload)
            header, payload = encode_job(message, tensor_bytes(twist(rows, rows).astype(np.float32)))
        await send(receiver, header, payload)

    router.send = lie  # type: ignore[method-assign]


async def test_what_the_origin_itself_got_is_no_matter_of_opinion(patient_clock: MockClock) -> None:
    """The last stage is here, so the liar's record, which has the truth, is of no use to it."""
    pools = {A: FakePool("0:4", "8:12"), LIAR: FakePool("4:8"), M: FakePool("4:8"), N: FakePool("4:8")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        send_other_rows(swarm, LIAR, TWISTS["zeros"])
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert await ask(swarm)


async def test_where_two_neighbours_contradict_each_other_the_next_route_separates_them(
    patient_clock: MockClock,
) -> None:
    async with open_swarm(five(FakePool("4:8")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        send_other_rows(swarm, LIAR, TWISTS["zeros"])
        await asked_and_checked(swarm)
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.DISPUTED) == count(swarm, H, TrustEvent.DISPUTED) == 1
        for _ in range(20):
            assert await ask(swarm)
        assert trust.score(H) > NEUTRAL >= trust.score(LIAR)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == count(swarm, H, TrustEvent.WRONG_RESULT) == 0


def deny(swarm: Swarm, node_id: str, change: Callable[[FetchRows, RowsPiece], RowsPiece]) -> None:
    """It does its work, and lies about what came to it or left it."""
    node = swarm[node_id]
    real = node.pipelines.on_request

    async def answer(sender: str, body: bytes) -> bytes:
        request, answered = decode_request(body), await real(sender, body)
        if isinstance(request, FetchRows):
            piece = decode_response(answered)
            assert isinstance(piece, RowsPiece)
            return msgspec.msgpack.encode(change(request, piece))
        return answered

    node.router.serve(answer, node.pipelines.on_message)


def zeroed(request: FetchRows, piece: RowsPiece) -> RowsPiece:
    return msgspec.structs.replace(piece, rows=memoryview(bytes(len(piece.rows))), digest=bytes(32))


def withheld(request: FetchRows, piece: RowsPiece) -> RowsPiece:
    return RowsPiece(request_id=request.request_id, known=False)


async def test_a_stage_that_denies_what_it_got_gains_nothing(
    drawn: list[str], patient_clock: MockClock
) -> None:
    """It wants an honest neighbour to be charged. Both lose some merit and nothing else."""
    drawn[:] = [M, N, C]
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), N: FakePool("4:8"), C: FakePool("4:8")}
    async with open_swarm(pools | {LIAR: FakePool("8:12"), H: FakePool("8:12")}, settings=ALWAYS) as swarm:
        deny(swarm, LIAR, zeroed)
        await prefer(swarm, LIAR, H)
        for _ in range(20):
            assert await asked_and_checked(swarm)
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.DISPUTED) >= 1
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (M, N, C, H))
        assert all(count(swarm, node_id, TrustEvent.WRONG_RESULT) == 0 for node_id in (M, N, C, H))


async def test_a_stage_that_withholds_its_record_is_judged_by_what_the_next_one_got(
    patient_clock: MockClock,
) -> None:
    liar = LyingPool("4:8", TWISTS["zeros"])
    async with open_swarm(five(liar), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        deny(swarm, LIAR, withheld)
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.DISPUTED) == count(swarm, H, TrustEvent.DISPUTED) == 1
        assert await ask(swarm)


async def test_with_one_other_holder_it_cannot_be_known_which_of_the_two_is_wrong(
    patient_clock: MockClock,
) -> None:
    pools = {
        A: FakePool("0:4"),
        LIAR: LyingPool("4:8", TWISTS["zeros"]),
        M: FakePool("4:8"),
        H: FakePool("8:12"),
    }
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M)
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 0
        assert count(swarm, LIAR, TrustEvent.DISPUTED) == count(swarm, M, TrustEvent.DISPUTED) == 1


async def test_a_holder_that_computes_wrong_rows_for_a_check_is_outvoted(patient_clock: MockClock) -> None:
    pools = five(LyingPool("4:8", TWISTS["zeros"]))
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        # The most trusted holder is asked first.
        swarm[A].trust.note(LIAR, TrustEvent.SERVED)
        await prefer(swarm, M, LIAR, N)
        assert await asked_and_checked(swarm)
        assert count(swarm, M, TrustEvent.CHECKED) == 1
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert swarm[A].trust.score(M) > NEUTRAL


async def test_the_second_of_two_stages_elsewhere_is_checked_against_what_it_says_it_got(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:3"), B: FakePool("3:6"), LIAR: LyingPool("6:9", TWISTS["zeros"])}
    pools |= {M: FakePool("6:9"), N: FakePool("6:9"), C: FakePool("3:6"), H: FakePool("9:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        for _ in range(12):
            await prefer(swarm, LIAR, M, N)
            await asked_and_checked(swarm)
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (B, M, N, H))


async def test_a_stage_that_denies_what_came_to_it_charges_nobody_with_wrong_results(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:3"), B: FakePool("3:6"), C: FakePool("3:6"), LIAR: FakePool("6:9")}
    pools |= {M: FakePool("6:9"), N: FakePool("6:9"), H: FakePool("9:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        deny(swarm, LIAR, zeroed)
        await prefer(swarm, LIAR, M, N)
        for _ in range(10):
            assert await asked_and_checked(swarm)
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.DISPUTED) + count(swarm, LIAR, TrustEvent.WRONG_RESULT) >= 1
        assert all(count(swarm, node_id, TrustEvent.WRONG_RESULT) == 0 for node_id in (B, C, M, N, H))
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (B, C, M, N, H))


async def test_a_token_that_the_origin_was_not_told_accuses_no_first_stage(
    drawn: list[str], patient_clock: MockClock
) -> None:
    """The last stage gives the origin another token than the first stage, which computes what it got."""
    drawn[:] = [B, C, M]
    pools = {
        A: FakePool(),
        B: FakePool("0:6"),
        C: FakePool("0:6"),
        M: FakePool("0:6"),
        LIAR: FakePool("6:12"),
    }
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        router, send = swarm[LIAR].router, swarm[LIAR].router.send

        async def lie(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, StreamingToken):
                header, payload = encode_job(msgspec.structs.replace(message, token=1), payload)
            await send(receiver, header, payload)

        router.send = lie  # type: ignore[method-assign]
        for _ in range(10):
            await asked_and_checked(swarm)
        assert all(count(swarm, node_id, TrustEvent.WRONG_RESULT) == 0 for node_id in (B, C, M))
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, C, M))


class LyingHead(FakePool):
    """Gives the client another token from the answer's third one on, and goes on with that."""

    def _sample(self, slot: Any, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        token, piece = super()._sample(slot, request_id, row)
        if token.index >= 2:
            token, piece = msgspec.structs.replace(token, token=(token.token + 1) % PRIME), b"lie "
        return token, piece


def heads(liar: FakePool) -> dict[str, FakePool]:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), LIAR: liar}
    return pools | {M: FakePool("8:12"), N: FakePool("8:12")}


async def test_honest_last_stages_are_right_in_every_token(patient_clock: MockClock) -> None:
    async with open_swarm(heads(FakePool("8:12")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        for _ in range(10):
            assert await asked_and_checked(swarm)
        assert swarm[A].trust.explain(LIAR).counts == {"served": 10, "checked": 10}
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()


@pytest.mark.parametrize(
    "liar", [LyingHead("8:12"), LyingPool("8:12", TWISTS["zeros"])], ids=["token", "rows"]
)
async def test_a_last_stage_that_gives_other_tokens_is_out_of_all_routes(
    liar: FakePool, patient_clock: MockClock
) -> None:
    async with open_swarm(heads(liar), settings=ALWAYS) as swarm:
        for _ in range(8):
            await prefer(swarm, LIAR, M, N)
            await asked_and_checked(swarm)
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) >= 1
        for _ in range(5):
            assert await ask(swarm)
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()


async def test_the_origin_samples_by_itself_what_it_can(patient_clock: MockClock) -> None:
    pools = {A: FakePool("8:12"), B: FakePool("0:8"), LIAR: LyingHead("8:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        await prefer(swarm, LIAR)
        for _ in range(8):
            await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) >= 1
        assert swarm[A].trust.score(B) >= NEUTRAL
        await swarm.quiet()


async def test_only_the_origin_gets_rows_and_only_at_boundaries_of_the_stage() -> None:
    async with open_swarm(five(FakePool("4:8")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        entered, seen = trio.Event(), trio.Event()

        async def wait(position: int, layers: LayerRange) -> None:
            if position > len(PROMPT) + 3:
                entered.set()
                await seen.wait()

        swarm[LIAR].pool.before_forward = wait

        async def rows(asker: str, boundary: int, position: int = 0, n: int = 8) -> RowsPiece:
            (request_id,) = (chain.context.request_id for chain in swarm[A].pipelines._requests.chains())
            request = FetchRows(request_id=request_id, boundary=boundary, position=position, n_tokens=n)
            piece = decode_response(
                await swarm[asker].router.request(LIAR, encode_request(request), timeout_s=5)
            )
            assert isinstance(piece, RowsPiece)
            return piece

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, swarm)
            with trio.fail_after(DEADLINE_S):
                await entered.wait()
            assert (await rows(A, 4)).known
            assert (await rows(A, 8)).known
            for asker, boundary, position in ((M, 8, 0), (H, 4, 0), (A, 5, 0), (A, 12, 0), (A, 8, 4000)):
                assert not (await rows(asker, boundary, position)).known
            seen.set()
        await swarm.quiet()


async def test_rows_after_a_beginning_that_was_kept_are_checked_too(patient_clock: MockClock) -> None:
    """The stages have the KV of the first rows from an earlier request, whose rows nobody has any more."""
    liar = LyingPool("4:8")
    async with open_swarm(five(liar), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)

        async def again(turn: int) -> None:
            async with swarm[A].pipelines.generate(
                Prompt(text=f"{PROMPT} {turn}"), swarm.entry, Sampling(max_tokens=N_TOKENS)
            ) as generation:
                assert [piece async for piece in generation]
                assert (generation.n_cached_tokens > 0) is (turn > 0)
            await checked(swarm, turn + 1)

        await again(0)
        await again(1)
        assert count(swarm, LIAR, TrustEvent.CHECKED) == 2
        liar.twist = TWISTS["zeros"]
        await again(2)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1


async def test_nothing_is_held_where_nothing_is_checked() -> None:
    async with open_swarm(five(FakePool("4:8"))) as swarm:
        assert await ask(swarm)
        await swarm.quiet()
        assert all(("hold" not in {call[0] for call in node.pool.calls}) for node in swarm.nodes.values())


class ShortHead(FakePool):
    """Says after three tokens that there are as many as were asked for."""

    def _sample(self, slot: Any, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        token, piece = super()._sample(slot, request_id, row)
        if token.index == 2:
            token = msgspec.structs.replace(token, finish_reason="length")
        return token, piece


async def test_a_last_stage_that_ends_texts_for_want_of_room_is_avoided_at_once(
    patient_clock: MockClock,
) -> None:
    """That is no matter of checks, and no client gets a text that is cut off."""
    async with open_swarm(heads(ShortHead("8:12")), settings=PipelineSettings(check_rate=0.0)) as swarm:
        trust = swarm[A].trust
        await prefer(swarm, LIAR, M, N)
        for _ in range(20):
            assert await ask(swarm)
        assert trust.explain(LIAR).counts == {"broke protocol": 1}
        assert trust.score(LIAR) < NEUTRAL
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()
