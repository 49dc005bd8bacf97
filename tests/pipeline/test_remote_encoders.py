"""Pictures that another node encodes: who is asked, what is believed of an answer, what a holder gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from node_ids import A, B, C, D
from trio.testing import MockClock
from vision_models import picture

from bench.common.arithmetic import N_EMBD, PRIME, FakePool, fake_entry
from swarmllm.errors import (
    BadModel,
    InvalidRequest,
    Overloaded,
    RemoteError,
    SwarmLLMError,
    VisionEncoderUnavailable,
    WorkerDied,
)
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.projector import Projector
from swarmllm.pictures import Picture, PromptPictures, parse_picture
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.pictures import EncodedBy
from swarmllm.pipeline.prefix.choice import HolderPath
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.vision.choice import Encoder, by_projector, in_order
from swarmllm.pipeline.vision.race import FAR, SILENCE_S, USUAL_S, EncodingTimes, Race, Runner
from swarmllm.pipeline.vision.serving import PLACES, SLICE_S
from swarmllm.pipeline.vision.slices import parts_of
from swarmllm.scheduling.constraints import Constraints
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm.workerpool.encoders import EncodedPicture, encoded_picture
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import decode_request, decode_response, encode_request, encode_response
from swarmllm_proto.identifiers import Digest
from swarmllm_proto.ipc import PicturePart, Sampling
from swarmllm_proto.limits import IMAGE_MAX, MIB, PICTURE_BYTES_MAX
from swarmllm_proto.swarm import ProjectorAnnounce, VisionEncodeRequest, VisionEncodeResponse
from swarmllm_proto.swarm.vision import bound_digest

from .fakes import FakeNode, Swarm, open_swarm

PROJECTOR = Projector(path="/mm", size_bytes=1, mtime_ns=1, blake3="ab" * 32, family="mlp", n_embd=N_EMBD)
OTHER_PROJECTOR = "cd" * 32
SEEING = replace(fake_entry(), projector=PROJECTOR)
BLIND = fake_entry()
SHOWN = picture(20, 20, 1)
LARGE = parse_picture(SHOWN.data + bytes(2 * IMAGE_MAX + 77), "picture")
LIES = Callable[[VisionEncodeRequest, VisionEncodeResponse], VisionEncodeResponse | bytes]


@dataclass
class SeeingPool(FakePool):
    """Rows follow from the picture's file; around them stands the token 7."""

    n_rows: int = 5
    seen: list[str] = field(default_factory=list)
    failure: Exception | None = None
    gate: trio.Event | None = None

    def __post_init__(self) -> None:
        FakePool.__init__(self, "0:12")

    async def encode_picture(
        self, model: ModelFile, projector: Projector, shown: Picture, *, is_kept: bool = True
    ) -> EncodedPicture:
        assert (model.model_id, projector) == (BLIND.model_id, PROJECTOR)
        await trio.lowlevel.checkpoint()
        self.seen.append(shown.digest)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return what(shown, self.n_rows)


def what(shown: Picture, n_rows: int = 5) -> EncodedPicture:
    rng = np.random.default_rng(int(shown.digest[:8], 16))
    rows = rng.standard_normal((n_rows, N_EMBD), np.float32)
    return encoded_picture((PicturePart((7, 8)), PicturePart((), n_rows), PicturePart((9,))), rows, N_EMBD)


def announced(projector: str = PROJECTOR.blake3, n_embd: int = N_EMBD) -> ProjectorAnnounce:
    return ProjectorAnnounce(model_id=BLIND.model_id, projector=Digest(projector), n_embd=n_embd)


@asynccontextmanager
async def seeing(*holders: str, **settings: Any) -> AsyncIterator[Swarm]:
    """A (which has no projector), and nodes that have one and say so."""
    holdings: dict[str, Any] = {A: FakePool("0:12"), **{node_id: SeeingPool() for node_id in holders}}
    async with open_swarm(holdings, settings=PipelineSettings(**settings), entry=SEEING) as swarm:
        for node_id in holders:
            await swarm[node_id].announce_projectors(announced())
        await known(swarm, set(holders))
        yield swarm


async def known(swarm: Swarm, holders: set[str]) -> None:
    with trio.fail_after(DEADLINE_S):
        while set(swarm[A].registry.encoders(BLIND.model_id)) != holders:
            await trio.lowlevel.checkpoint()


async def look(
    swarm: Swarm, shown: Picture = SHOWN, entry: CatalogueEntry = BLIND
) -> tuple[EncodedPicture, EncodedBy]:
    encoder = (await swarm[A].pipelines.encoders.by_projector(entry, [shown], "messages[0]"))[0]
    encoded = await encoder.encode(shown, "messages[0]")
    return encoded, encoder.looked[0]


def assert_same(found: EncodedPicture, expected: EncodedPicture) -> None:
    assert np.array_equal(found.tokens, expected.tokens)
    assert found.rows.tobytes() == expected.rows.tobytes()
    assert found.ends == expected.ends


def lie(node: FakeNode, twist: LIES) -> list[VisionEncodeRequest]:
    """Its answers about pictures are twisted; what it was asked."""
    honest, asked = node.pipelines.on_request, list[VisionEncodeRequest]()

    async def twisted(sender: Any, body: bytes) -> bytes:
        answer = await honest(sender, body)
        request, response = decode_request(body), decode_response(answer)
        if not isinstance(request, VisionEncodeRequest):
            return answer
        asked.append(request)
        assert isinstance(response, VisionEncodeResponse)
        said = twist(request, response)
        return said if isinstance(said, bytes) else encode_response(said)

    node.router.serve(twisted, node.pipelines.on_message)
    return asked


async def test_rows_from_another_node_are_those_of_its_encoder_and_are_kept() -> None:
    async with seeing(B) as swarm:
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert (looked.node_id, looked.nickname, looked.n_rows) == (B, "nick-b", 5)
        assert not looked.is_kept
        again, looked = await look(swarm)
        assert again is encoded
        assert (looked.node_id, looked.is_kept) == (A, True)
        assert swarm[B].pool.seen == [SHOWN.digest]
        counts = swarm[A].pipelines.statistics(), swarm[B].pipelines.statistics()
        assert (counts[0].pictures_fetched, counts[1].pictures_given) == (1, 1)
        await swarm.quiet()


async def test_a_large_picture_and_many_rows_travel_in_slices() -> None:
    async with seeing(B) as swarm:
        swarm[B].pool.n_rows = 2 * 3 * MIB // (4 * N_EMBD) + 11
        asked = lie(swarm[B], lambda request, response: response)
        encoded, _ = await look(swarm, LARGE)
        assert_same(encoded, what(LARGE, swarm[B].pool.n_rows))
        assert [len(each.image) for each in asked] == [
            IMAGE_MAX,
            IMAGE_MAX,
            len(LARGE.data) - 2 * IMAGE_MAX,
            0,
            0,
        ]
        assert [each.first_row * 4 * N_EMBD for each in asked[-2:]] == [3 * MIB, 6 * MIB]
        await swarm.quiet()


LIARS: dict[str, LIES] = {
    "rows of another width": lambda _, said: replaced(said, n_embd=N_EMBD + 1),
    "more rows than it gives": lambda _, said: replaced(said, n_rows=6),
    "more rows than anybody has": lambda _, said: replaced(said, n_rows=2**31 - 1),
    "fewer rows than it gives": lambda _, said: replaced(said, n_rows=4),
    "half a row": lambda _, said: replaced(said, rows=said.rows[:-2]),
    "numbers that are none": lambda request, said: with_rows(request, said, np.full((5, N_EMBD), np.nan)),
    "numbers without end": lambda request, said: with_rows(request, said, np.full((5, N_EMBD), np.inf)),
    "rows of another picture": lambda request, said: with_rows(request, said, what(LARGE).rows, LARGE.digest),
    "rows that were changed": lambda _, said: replaced(said, rows=memoryview(bytes(said.rows)[::-1])),
    "parts that are not as many": lambda request, said: with_parts(request, said, PicturePart((), 4)),
    "a part that is as large as a lie": lambda request, said: with_parts(
        request, said, PicturePart((), 2**31 - 1)
    ),
    "no parts": lambda _, said: replaced(said, parts=UNSET),
    "tokens that nobody has": lambda request, said: with_parts(
        request, said, PicturePart((PRIME,)), PicturePart((), 5)
    ),
    "the answer to another question": lambda _, said: replaced(said, request_id="another"),
    "nonsense": lambda _, said: b"\x93nonsense",
    "no digest": lambda _, said: replaced(said, digest=UNSET),
    "an encoder that is gone": lambda _, said: VisionEncodeResponse(
        request_id=said.request_id, error="VisionEncoderUnavailable"
    ),
    "a picture that is damaged": lambda _, said: VisionEncodeResponse(
        request_id=said.request_id, error="BadImage"
    ),
    "an encoder that ends": lambda _, said: VisionEncodeResponse(
        request_id=said.request_id, error="EncoderDied"
    ),
}
NOT_BLAMED = (
    "an encoder that is gone",
    "more rows than it gives",
    "a picture that is damaged",
    "an encoder that ends",
)


def replaced(said: VisionEncodeResponse, **fields: Any) -> VisionEncodeResponse:
    return msgspec.structs.replace(said, **fields)


def with_rows(
    request: VisionEncodeRequest, said: VisionEncodeResponse, rows: np.ndarray, digest: str = ""
) -> VisionEncodeResponse:
    """With the digest that these rows have."""
    data = rows.astype("<f4").tobytes()
    assert said.parts is not UNSET
    bound = bound_digest(
        request.model_id, Digest(PROJECTOR.blake3), Digest(digest or SHOWN.digest), said.parts, data
    )
    return replaced(said, n_rows=len(rows), rows=memoryview(data), digest=bound)


def with_parts(
    request: VisionEncodeRequest, said: VisionEncodeResponse, *parts: PicturePart
) -> VisionEncodeResponse:
    bound = bound_digest(request.model_id, Digest(PROJECTOR.blake3), Digest(SHOWN.digest), parts, said.rows)
    return replaced(said, parts=parts, digest=bound)


@pytest.mark.parametrize("name", LIARS)
async def test_what_cannot_be_is_refused_and_the_next_node_asked(name: str) -> None:
    async with seeing(B, C) as swarm:
        asked = lie(swarm[B], LIARS[name])
        swarm.network.set_link(A, C, LinkQuality(0.02))
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert looked.node_id == C
        assert asked, "the nearer one is asked first"
        trust = swarm[A].trust.score(B)
        assert (trust == NEUTRAL) if name in NOT_BLAMED else (trust < NEUTRAL)
        assert swarm[A].trust.score(C) == NEUTRAL
        n_asked = len(asked)
        await look(swarm, picture(21, 21))
        if name not in NOT_BLAMED[2:]:
            assert len(asked) == n_asked, "it comes last for a while"


async def test_the_only_node_is_asked_again_after_a_failure() -> None:
    async with seeing(B) as swarm:
        n_lies = 1

        def once(request: VisionEncodeRequest, said: VisionEncodeResponse) -> VisionEncodeResponse:
            nonlocal n_lies
            n_lies -= 1
            return replaced(said, digest=UNSET) if n_lies >= 0 else said

        lie(swarm[B], once)
        with pytest.raises(VisionEncoderUnavailable):
            await read(swarm, BLIND)
        await read(swarm, BLIND)


async def test_silence_is_not_waited_for_without_end(patient_clock: MockClock) -> None:
    async with seeing(B, C) as swarm:

        async def silent(sender: Any, body: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        swarm[B].router.serve(silent, swarm[B].pipelines.on_message)
        swarm.network.set_link(A, C, LinkQuality(0.02))
        began_s = trio.current_time()
        _, looked = await look(swarm)
        assert looked.node_id == C
        assert trio.current_time() - began_s < 4
        assert swarm[A].trust.score(B) < NEUTRAL
        began_s = trio.current_time()
        await look(swarm, picture(21, 21))
        assert trio.current_time() - began_s < 1, "it comes last for a while"


async def test_who_is_far_slower_than_expected_is_overtaken_and_told_so(patient_clock: MockClock) -> None:
    async with seeing(B, C) as swarm:
        asked = lie(swarm[B], lambda request, response: response)
        swarm.network.set_link(A, C, LinkQuality(0.02))
        swarm[B].pool.gate = trio.Event()
        began_s = trio.current_time()
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert looked.node_id == C
        assert 4 <= trio.current_time() - began_s < 6, "it lives, so it has some time"
        assert len(asked) > 2
        assert swarm[A].trust.score(B) == NEUTRAL, "slowness is no fault"
        await trio.testing.wait_all_tasks_blocked()
        assert not swarm[B].pipelines.statistics().active_stage_requests, "its place is free again"
        assert not swarm[A].pipelines.statistics().messages_ignored
        swarm[B].pool.gate.set()
        assert (await look(swarm, picture(21, 21)))[1].node_id == C, "it comes last for a while"
        await trio.sleep(61)
        assert (await look(swarm, picture(22, 22)))[1].node_id == C, "and is known to be slow"


async def test_the_slow_one_still_wins_where_the_others_are_slower(patient_clock: MockClock) -> None:
    async with seeing(B, C, D) as swarm:
        for node_id, rtt_s in ((C, 0.02), (D, 0.03)):
            swarm.network.set_link(A, node_id, LinkQuality(rtt_s))
            swarm[node_id].pool.gate = trio.Event()
        slow = swarm[B].pool.gate = trio.Event()

        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _() -> None:
                await trio.sleep(9)
                slow.set()

            encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert looked.node_id == B
        assert [len(swarm[node_id].pool.seen) for node_id in (B, C, D)] == [1, 1, 1]
        assert swarm[A].pipelines.statistics().pictures_fetched == 1
        await trio.sleep(1)
        assert not any(swarm[node_id].pipelines.statistics().active_stage_requests for node_id in (B, C, D))


async def test_a_request_that_is_cancelled_leaves_nothing_at_its_encoders() -> None:
    async with seeing(B) as swarm:
        swarm[B].pool.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, swarm)
            while not swarm[B].pool.seen:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await swarm.quiet()


def asked_for(*names: str, now_s: float = 0.0, **fields: float) -> Race:
    return Race.of([Runner(name, **fields) for name in names], now_s)


def test_the_next_one_begins_beside_a_silent_one_and_three_run_at_most() -> None:
    race = asked_for("a", "b", "c", "d")
    first = race.begin(0.0)
    assert first is not None
    assert first.node_id == "a"
    assert race.begin(SILENCE_S - 0.1) is None
    assert race.look_again_s() == SILENCE_S
    for index, name in enumerate("bc", start=1):
        begun = race.begin(index * SILENCE_S)
        assert begun is not None
        assert begun.node_id == name
    assert race.begin(1000.0) is None
    assert race.look_again_s() == float("inf")
    race.failed("b", 1000.0)
    begun = race.begin(1000.0)
    assert begun is not None
    assert begun.node_id == "d"
    assert not race.is_over
    assert race.overtaken(1000.0) == [("a", 1000.0, True), ("c", 1000.0 - 2 * SILENCE_S, True)]


def test_a_node_that_says_that_it_lives_has_as_long_as_was_expected_twice() -> None:
    race = asked_for("a", "b", work_s=5.0)
    race.begin(0.0)
    for second in range(1, 10):
        assert race.begin(float(second)) is None
        race.heard("a", float(second))
    assert race.look_again_s() == FAR * 5.0
    assert race.begin(FAR * 5.0) is not None
    assert race.won("b", FAR * 5.0 + 1.5) == 1.5
    assert race.overtaken(FAR * 5.0) == [("a", FAR * 5.0, False)]
    assert Runner("a", 1000.0).late_after_s == 20.0


def test_a_slow_line_is_no_reason_to_send_a_picture_twice() -> None:
    line = Encoder(HolderPath("far", 0.1, 1e6), Digest("ab" * 32), 0.5, encoding_s=3.0)
    small, large = 10**5, 32 * MIB
    assert line.slice_s(small, 64) < 0.5, "rows that are few are not waited for as many are"
    assert 3.1 < line.slice_s(large, 64) < 3.5
    runner = Runner("far", line.work_s, line.travel_s(large, 64), line.slice_s(large, 64))
    assert line.travel_s(large, 64) > 33
    assert runner.late_after_s > 2 * 33 + FAR * 3
    race = Race.of([runner], 0.0)
    race.begin(0.0)
    assert race.won("far", runner.travel_s + 2.5) == pytest.approx(2.5), "travelling is no work"
    assert runner.silence_s == SILENCE_S + FAR * line.slice_s(large, 64)


def test_busy_ones_are_asked_again_after_all_others() -> None:
    race = asked_for("a", "b")
    race.begin(0.0)
    race.failed("a", 0.1, is_busy=True)
    begun = race.begin(0.1)
    assert begun is not None
    assert begun.node_id == "b"
    race.failed("b", 0.2)
    assert race.begin(0.2) is None
    assert not race.is_over
    assert race.begin(race.look_again_s()) is not None
    assert not race.is_busy, "it is asked again, and has not said so"
    race.failed("a", 40.0, is_busy=True)
    assert race.is_over
    assert race.is_busy


def test_a_pace_rises_at_once_and_falls_by_and_by() -> None:
    paces = EncodingTimes()
    assert paces.expected_s("a") == USUAL_S
    paces.took("a", 10.0)
    paces.took("a", 0.0)
    assert paces.expected_s("a") == 8.0
    paces.took("a", 20.0)
    assert paces.expected_s("a") == 20.0


@pytest.mark.parametrize("what_it_says", ["nothing came", "not yet"])
async def test_who_never_finishes_is_left(what_it_says: str, patient_clock: MockClock) -> None:
    def late(request: VisionEncodeRequest, said: VisionEncodeResponse) -> VisionEncodeResponse:
        n_received = 0 if what_it_says == "nothing came" else len(SHOWN.data)
        return VisionEncodeResponse(request_id=said.request_id, n_received=n_received)

    async with seeing(B, C) as swarm:
        asked = lie(swarm[B], late)
        swarm.network.set_link(A, C, LinkQuality(0.02))
        with trio.fail_after(200):
            _, looked = await look(swarm)
        assert looked.node_id == C
        assert len(asked) < 500
        n_asked = len(asked)
        await look(swarm, picture(21, 21))
        assert len(asked) == n_asked, "it comes last for a while"
    async with seeing(B) as swarm:
        asked = lie(swarm[B], late)
        with trio.fail_after(200), pytest.raises(VisionEncoderUnavailable):
            await read(swarm, BLIND)
        assert len(asked) < 500
        assert swarm[A].trust.score(B) < NEUTRAL, "nobody was faster: it has had all the time"


async def test_a_node_that_is_lost_meanwhile_is_not_the_end() -> None:
    async with seeing(B, C) as swarm:
        swarm.network.set_link(A, C, LinkQuality(0.02))
        swarm[B].pool.gate = trio.Event()
        pool = swarm[B].pool
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _() -> None:
                while not pool.seen:
                    await trio.lowlevel.checkpoint()
                swarm.kill(B)

            _, looked = await look(swarm)
        assert looked.node_id == C


async def test_busy_nodes_are_asked_again_for_a_while(patient_clock: MockClock) -> None:
    async with seeing(B) as swarm:
        n_busy = 3

        def busy(request: VisionEncodeRequest, said: VisionEncodeResponse) -> VisionEncodeResponse:
            nonlocal n_busy
            n_busy -= 1
            return said if n_busy < 0 else VisionEncodeResponse(request_id=said.request_id, error="Busy")

        lie(swarm[B], busy)
        assert (await look(swarm))[1].node_id == B
        n_busy = 10**6
        shown = picture(22, 22)
        with pytest.raises(Overloaded, match="are busy"):
            await read(swarm, BLIND, shown)
        assert swarm[A].trust.score(B) == NEUTRAL


async def read(swarm: Swarm, entry: CatalogueEntry, shown: Picture = SHOWN) -> None:
    """As a request does it."""
    prompt = Prompt(text="AAA", pictures=PromptPictures({"AAA": shown}), field="messages[0]")
    await swarm[A].pipelines.prompts.read(prompt, entry, Sampling())


async def test_a_picture_that_two_encoders_refuse_is_the_clients_fault() -> None:
    async with seeing(B, C, D) as swarm:
        for node_id in (B, C, D):
            swarm[node_id].pool.failure = InvalidRequest("the png file is damaged")
        with pytest.raises(InvalidRequest, match="the picture is damaged") as caught:
            await read(swarm, BLIND)
        assert caught.value.field == "messages[0]"
        assert sum(len(swarm[node_id].pool.seen) for node_id in (B, C, D)) == 2
        for node_id in (B, C, D):
            swarm[node_id].pool.failure = WorkerDied("it was killed by signal 11")
        with pytest.raises(VisionEncoderUnavailable, match="ended the encoders"):
            await read(swarm, BLIND, picture(23, 23))
        assert sum(len(swarm[node_id].pool.seen) for node_id in (B, C, D)) == 4


async def test_no_encoder_is_told_apart_from_none_that_can_be_reached() -> None:
    async with seeing(B) as swarm:
        encoders = swarm[A].pipelines.encoders
        await encoders.require(BLIND, "f", {"picture"})
        await swarm[B].announce_projectors(announced(n_embd=N_EMBD + 1))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(VisionEncoderUnavailable):
            await encoders.require(BLIND, "f", {"picture"})
        swarm.kill(B)
        await known(swarm, set())
        with pytest.raises(VisionEncoderUnavailable, match=r"no node that encodes pictures .* is connected"):
            await read(swarm, BLIND)
    async with seeing() as swarm:
        for call in (swarm[A].pipelines.encoders.require(BLIND, "f", {"picture"}), read(swarm, BLIND)):
            with pytest.raises(InvalidRequest, match="takes no pictures; send text only"):
                await call


async def test_where_all_fail_the_client_may_come_again() -> None:
    async with seeing(B, C) as swarm:
        for node_id in (B, C):
            lie(swarm[node_id], LIARS["no digest"])
        with pytest.raises(VisionEncoderUnavailable, match="the digest is not that"):
            await read(swarm, BLIND)
        with pytest.raises(VisionEncoderUnavailable):
            await read(swarm, BLIND)


async def test_the_projector_of_this_node_is_used_and_no_other_one() -> None:
    async with seeing(B, C) as swarm:
        swarm[A].pool = None
        own = SeeingPool()
        swarm[A].pipelines.encoders._compute = own  # type: ignore[assignment]
        assert (await look(swarm, entry=SEEING))[1].node_id == A
        await swarm[B].announce_projectors(announced(OTHER_PROJECTOR))
        while swarm[A].registry.encoders(BLIND.model_id)[B].projector != OTHER_PROJECTOR:
            await trio.lowlevel.checkpoint()
        own.failure = BadModel("the projector /mm has changed")
        assert (await look(swarm, picture(24, 24), SEEING))[1].node_id == C
        swarm.kill(C)
        await known(swarm, {B})
        with pytest.raises(VisionEncoderUnavailable, match="has changed"):
            await look(swarm, picture(25, 25), SEEING)


@pytest.mark.parametrize(
    "settings",
    [
        {"local_embedding_privacy": True},
        {"constraints": Constraints(is_private=True)},
        {"constraints": Constraints(private_models=frozenset({"arithmetic"}))},
    ],
)
async def test_a_private_prompt_shows_its_pictures_to_nobody(settings: dict[str, Any]) -> None:
    async with seeing(B, **settings) as swarm:
        with pytest.raises(InvalidRequest, match="may not leave this node"):
            await read(swarm, BLIND)
        assert not swarm[A].pipelines.encoders.elsewhere(BLIND.model_id, BLIND)
        assert not swarm[B].pool.seen


def request_for(shown: Picture, request_id: str = "r1", **fields: Any) -> VisionEncodeRequest:
    asked = VisionEncodeRequest(
        request_id=request_id,
        model_id=BLIND.model_id,
        image=memoryview(shown.data),
        projector=Digest(PROJECTOR.blake3),
        digest=Digest(shown.digest),
    )
    return msgspec.structs.replace(asked, **fields)


async def say(swarm: Swarm, request: VisionEncodeRequest, sender: str = A) -> VisionEncodeResponse:
    answer = decode_response(await swarm[sender].router.fetch(B, encode_request(request), timeout_s=60))
    assert isinstance(answer, VisionEncodeResponse)
    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"projector": UNSET},
        {"projector": OTHER_PROJECTOR},
        {"digest": UNSET},
        {"model_id": "ef" * 32},
        {"offset": 1},
        {"first_row": 1},
        {"image": memoryview(b""), "size_bytes": 10},
    ],
)
async def test_what_a_holder_does_not_have_it_says_at_once(fields: dict[str, Any]) -> None:
    async with seeing(B) as swarm:
        answer = await say(swarm, request_for(SHOWN, **fields))
        assert answer == VisionEncodeResponse(request_id="r1", error="VisionEncoderUnavailable")
        assert not swarm[B].pool.seen
        await swarm.quiet()


async def test_rows_are_for_the_node_that_asked_and_gone_when_it_has_them() -> None:
    async with seeing(B, C) as swarm:
        swarm[B].pool.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, swarm, request_for(SHOWN))
            while not swarm[B].pool.seen:
                await trio.lowlevel.checkpoint()
            spying = request_for(SHOWN, image=memoryview(b""))
            assert (await say(swarm, spying, C)).error == "VisionEncoderUnavailable"
            swarm[B].pool.gate.set()
        assert (
            await say(swarm, request_for(SHOWN, image=memoryview(b"")))
        ).error == "VisionEncoderUnavailable"
        await swarm.quiet()


async def test_what_is_larger_than_said_or_allowed_is_refused_and_charged() -> None:
    async with seeing(B) as swarm:
        for fields in ({"size_bytes": PICTURE_BYTES_MAX + 1}, {"size_bytes": 10}):
            before = swarm[B].trust.score(A)
            with pytest.raises(RemoteError, match=r"larger|at most"):
                await say(swarm, request_for(SHOWN, **fields))
            assert swarm[B].trust.score(A) < before
        before = swarm[B].trust.score(A)
        other = await say(swarm, request_for(SHOWN, digest=Digest("12" * 32)))
        assert other.error == "VisionEncoderUnavailable"
        assert swarm[B].trust.score(A) < before
        no_picture = replace(SHOWN, data=b"no picture", digest=LARGE.digest)
        assert (await say(swarm, request_for(no_picture))).error in ("BadImage", "VisionEncoderUnavailable")
        assert not swarm[B].pool.seen
        await swarm.quiet()


async def test_places_are_shared_and_one_picture_of_others_is_encoded_at_a_time() -> None:
    async with seeing(B, C) as swarm:
        swarm[B].pool.gate = trio.Event()
        answers: list[VisionEncodeResponse] = []

        async def one(index: int, sender: str) -> None:
            answers.append(await say(swarm, request_for(picture(30 + index, 30), f"r{index}"), sender))

        async with trio.open_nursery() as nursery:
            for index in range(PLACES):
                nursery.start_soon(one, index, A)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert len(swarm[B].pool.seen) == 1
            assert swarm[B].pipelines.statistics().active_stage_requests == PLACES
            late = await say(swarm, request_for(SHOWN, "late"), C)
            assert late.error == "" or late.error == "Busy"
            again = await say(swarm, request_for(SHOWN, "again"), A)
            assert again.error == "Busy"
            swarm[B].pool.gate.set()
        assert {each.error for each in answers} <= {"", "Busy", "VisionEncoderUnavailable"}
        swarm.kill(A)
        swarm.kill(C)
        await swarm.quiet()


async def test_what_is_given_up_is_forgotten(patient_clock: MockClock) -> None:
    async with seeing(B) as swarm:
        half = request_for(LARGE, image=memoryview(LARGE.data[:IMAGE_MAX]), size_bytes=len(LARGE.data))
        assert (await say(swarm, half)).n_received == IMAGE_MAX
        assert (await say(swarm, half)).n_received == IMAGE_MAX, "a slice that comes twice changes nothing"
        assert swarm[B].pipelines.statistics().active_stage_requests == 1
        await trio.sleep(SLICE_S + 1)
        await trio.testing.wait_all_tasks_blocked()
        assert swarm[B].pipelines.statistics().active_stage_requests == 0
        assert (await say(swarm, msgspec.structs.replace(half, offset=IMAGE_MAX))).error


async def test_who_leaves_takes_its_pictures_along() -> None:
    async with seeing(B) as swarm:
        swarm[B].pool.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dying, say, swarm, request_for(SHOWN))
            while not swarm[B].pool.seen:
                await trio.lowlevel.checkpoint()
            swarm.kill(A)
        await swarm.quiet()


async def dying(work: Callable[..., Awaitable[object]], *args: object) -> None:
    with pytest.raises(SwarmLLMError):
        await work(*args)


async def test_who_ends_the_encoder_rests_for_a_while(patient_clock: MockClock) -> None:
    async with seeing(B) as swarm:
        swarm[B].pool.failure = WorkerDied("it was killed by signal 11")
        assert (await say(swarm, request_for(SHOWN))).error == "EncoderDied"
        swarm[B].pool.failure = None
        assert (await say(swarm, request_for(SHOWN, "r2"))).error == "Busy"
        await trio.sleep(61)
        assert (await say(swarm, request_for(SHOWN, "r3"))).n_rows == 5


def an_encoder(node_id: str, rtt_s: float | None = 0.01, **fields: Any) -> Encoder:
    return Encoder(HolderPath(node_id, rtt_s, 1e8), Digest("ab" * 32), **{"trust": 0.5} | fields)


def test_the_first_stage_comes_first_then_who_is_near_and_trusted() -> None:
    near, far = an_encoder("near"), an_encoder("far", 0.2)
    first = an_encoder("first", 0.3, is_first_stage=True)
    trusted = an_encoder("trusted", 0.015, trust=1.0)
    busy = an_encoder("busy", n_active=4)
    doubtful = an_encoder("doubtful", 0.001, is_first_stage=True, is_doubtful=True)
    found = in_order([doubtful, busy, far, near, trusted, first], 10**5, 64)
    assert [each.path.node_id for each in found] == ["first", "trusted", "near", "far", "busy", "doubtful"]


def test_projectors_that_pictures_are_known_of_come_first() -> None:
    ordered = [replace(an_encoder(str(index)), projector=Digest("abcdefg"[index])) for index in range(7)]
    ordered.append(replace(an_encoder("7"), projector=Digest("c")))
    holders = by_projector(ordered, [Digest("c"), Digest("none")])
    found = {projector: [each.path.node_id for each in its] for projector, its in holders.items()}
    assert list(found.items()) == [("c", ["2", "7"]), ("a", ["0"]), ("b", ["1"]), ("d", ["3"])]


RUNS = st.lists(
    st.one_of(st.integers(1, 9000).map(lambda n: (n, 0)), st.integers(1, 300).map(lambda n: (0, n))),
    min_size=1,
    max_size=12,
).filter(lambda runs: any(n_rows for _, n_rows in runs))


@given(RUNS)
def test_what_travels_becomes_the_same_picture(runs: list[tuple[int, int]]) -> None:
    n_rows = sum(n for _, n in runs)
    parts = [
        part
        for n_tokens, n in runs
        for part in (
            [PicturePart((), n)]
            if n
            else [PicturePart((1,) * min(4096, n_tokens - at)) for at in range(0, n_tokens, 4096)]
        )
    ]
    encoded = encoded_picture(parts, np.zeros((n_rows, 2), np.float32), 2)
    assert_same(encoded_picture(parts_of(encoded), encoded.rows, 2), encoded)
