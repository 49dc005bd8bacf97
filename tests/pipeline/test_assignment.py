"""What a stage is told when it is asked to take part, and what its answer means."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
import trio
from msgspec import UNSET, UnsetType
from node_ids import A, B, C, D
from trio.testing import MockClock

from bench.common.arithmetic import fake_entry
from swarmllm.errors import NodeBusy, NodeRefused, NodeUnreachable, RemoteError
from swarmllm.pipeline.origin.assignment import assign, assign_with_prefixes
from swarmllm.pipeline.origin.output import Blamed
from swarmllm.pipeline.request import request_context
from swarmllm_proto.codec import decode_request, encode_response
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAck, PipelineAssignment, Stage, StageBlocks, StageState

TIMEOUT_S = 3.0
ASSIGNMENT = PipelineAssignment(
    request_id="r1",
    model_id="a" * 64,
    origin=A,
    stages=tuple(Stage(node_id=node, start=4 * i, end=4 * i + 4) for i, node in enumerate((A, B, C))),
    n_prompt_tokens=10,
    sampling=Sampling(max_tokens=7, seed=3, stop=("secret",)),
    generated=(4, 5),
)
ACCEPTS = encode_response(PipelineAck(request_id="r1", accepted=True))


@dataclass
class Answering:
    """A router whose peers say what is given, by node id; the others accept."""

    answers: dict[str, bytes] = field(default_factory=dict)
    silent: str = ""
    node_id: str = A
    asked: dict[str, PipelineAssignment] = field(default_factory=dict)
    was_asked: trio.Event = field(default_factory=trio.Event)

    async def request(self, node_id: str, body: bytes, *, timeout_s: float) -> bytes:
        assert timeout_s == TIMEOUT_S
        await trio.lowlevel.checkpoint()
        assignment = decode_request(body)
        assert isinstance(assignment, PipelineAssignment)
        self.asked[node_id] = assignment
        self.was_asked.set()
        if node_id == self.silent:
            await trio.sleep_forever()
        return self.answers.get(node_id, ACCEPTS)


async def asked(router: Answering, blamed: Blamed | None = None) -> dict[str, PipelineAck]:
    blamed = Blamed() if blamed is None else blamed
    return await assign(router, ASSIGNMENT, timeout_s=TIMEOUT_S, blamed=blamed)  # type: ignore[arg-type]


async def test_only_who_samples_is_told_how_and_what_came_before() -> None:
    router = Answering()
    assert set(await asked(router)) == {B, C} == set(router.asked)
    last, other = router.asked[C], router.asked[B]
    assert (last.sampling, last.n_prompt_tokens, last.generated) == (ASSIGNMENT.sampling, 10, (4, 5))
    assert (other.sampling, other.n_prompt_tokens, other.generated) == (Sampling(), 12, ())
    assert other.n_generated is UNSET


async def test_all_stages_of_an_exact_request_are_told_what_its_bits_depend_on() -> None:
    router = Answering()
    sampling = Sampling(max_tokens=77, temperature=0.3, stop=("secret",), exact=True)
    assignment = msgspec.structs.replace(ASSIGNMENT, sampling=sampling)
    await assign(router, assignment, timeout_s=TIMEOUT_S, blamed=Blamed())  # type: ignore[arg-type]
    last, other = (request_context(router.asked[node_id], fake_entry(), node_id) for node_id in (C, B))
    assert (other.sampling, other.generated) == (Sampling(max_tokens=77, exact=True), ())
    assert (last.n_prompt_rows, other.n_prompt_rows) == (10, 10)
    assert last.exact_rows >= 10 + 77
    assert other.exact_rows >= 10 + 77


class Naming:
    """A chain, this node's worker and its fetcher in one: it names one block a stage and waits, before it has
    any of it, until another node has been asked."""

    def __init__(self, router: Answering, n_blocks: int = 1) -> None:
        self.blamed = Blamed()
        self._router, self._n_blocks = router, n_blocks

    def prefixes_of(self, node_id: str) -> tuple[StageBlocks, ...]:
        return tuple(
            StageBlocks(index, bytes(32))
            for index, stage in enumerate(ASSIGNMENT.stages)
            if stage.node_id == node_id
        )

    async def bring(self, *_: object, **__: object) -> None:
        await self._router.was_asked.wait()

    async def name_prefix(self, *_: object, **__: object) -> int:
        await trio.lowlevel.checkpoint()
        return self._n_blocks


async def named(router: Answering, naming: Naming, node_id: str = A) -> tuple[int, dict[str, PipelineAck]]:
    context = request_context(ASSIGNMENT, fake_entry(), node_id)  # type: ignore[arg-type]
    return await assign_with_prefixes(
        naming,  # type: ignore[arg-type]
        router,  # type: ignore[arg-type]
        ASSIGNMENT,
        context,
        naming,
        timeout_s=TIMEOUT_S,
        fetches=naming,  # type: ignore[arg-type]
    )


def knows(n_blocks: int) -> bytes:
    return encode_response(PipelineAck(request_id="r1", accepted=True, n_prefix_blocks=n_blocks))


async def test_stages_here_look_for_their_rows_while_others_do(autojump_clock: MockClock) -> None:
    router = Answering({B: knows(3), C: knows(2)})
    with trio.fail_after(1.0):
        n_blocks, acks = await named(router, Naming(router, n_blocks=4))
    assert (n_blocks, set(acks)) == (2, {B, C})
    n_blocks, _ = await named(router, Naming(router, n_blocks=1))
    assert n_blocks == 1


async def test_a_refusal_does_not_wait_for_stages_here(autojump_clock: MockClock) -> None:
    router = Answering({B: encode_response(PipelineAck(request_id="r1", accepted=False, reason="no"))})
    naming = Naming(Answering())
    with trio.fail_after(1.0), pytest.raises(NodeRefused, match="refused: no"):
        await named(router, naming)
    assert naming.blamed == Blamed(culprit=B)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            encode_response(PipelineAck(request_id="r1", accepted=False, reason="no")),
            NodeRefused,
            "refused: no",
        ),
        (encode_response(PipelineAck(request_id="r1", accepted=False)), NodeRefused, "no reason given"),
        (encode_response(PipelineAck(request_id="r1", accepted=False, busy=True)), NodeBusy, "refused"),
        (encode_response(PipelineAck(request_id="r2", accepted=True)), NodeRefused, "no reason given"),
        (encode_response(StageState(request_id="r1", known=True, busy=False)), RemoteError, "something else"),
        (b"\xc1", RemoteError, "nonsense"),
    ],
)
async def test_an_answer_that_does_not_accept_fails_the_attempt_and_names_its_node(
    answer: bytes, kind: type[RemoteError], text: str
) -> None:
    failed = Blamed()
    with pytest.raises(RemoteError, match=text) as raised:
        await asked(Answering({B: answer}), failed)
    assert type(raised.value) is kind
    assert f"node {B}" in raised.value.message
    assert failed == Blamed(culprit=B)


@pytest.mark.parametrize(
    ("named", "blamed"),
    [
        (C, Blamed(doubted=frozenset({B, C}))),
        # None of these can be what it does not reach next.
        (A, Blamed(culprit=B)),
        (B, Blamed(culprit=B)),
        (D, Blamed(culprit=B)),
        (UNSET, Blamed(culprit=B)),
    ],
)
async def test_one_that_does_not_reach_the_next_stage_is_not_to_blame_alone(
    named: str | UnsetType, blamed: Blamed
) -> None:
    no = encode_response(PipelineAck(request_id="r1", accepted=False, reason="no", unreachable=named))
    failed = Blamed()
    with pytest.raises(NodeRefused):
        await asked(Answering({B: no}), failed)
    assert failed == blamed


async def test_after_a_refusal_nobody_else_is_waited_for(autojump_clock: MockClock) -> None:
    began_s = trio.current_time()
    no = encode_response(PipelineAck(request_id="r1", accepted=False, reason="no"))
    with pytest.raises(NodeRefused):
        await asked(Answering({B: no}, silent=C))
    assert trio.current_time() == began_s


async def test_a_stage_that_does_not_answer_in_time_cannot_be_reached(autojump_clock: MockClock) -> None:
    failed = Blamed()
    with pytest.raises(NodeUnreachable, match="within 3 s"):
        await asked(Answering(silent=C), failed)
    assert failed == Blamed(culprit=C)
    assert trio.current_time() == pytest.approx(TIMEOUT_S)
