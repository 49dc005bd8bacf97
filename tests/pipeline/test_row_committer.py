"""When a stage signs for rows: in stretches, of rows that are final, by daemons and by links alike; and what
it keeps for the origin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
from blake3 import blake3
from node_ids import A, B, C, O

from swarmllm.errors import NodeUnreachable, WorkerError
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.ended_requests import (
    CANCELLED_MAX,
    REFUSED_MAX,
    REFUSED_S,
    EndedRequests,
    RefusedRows,
)
from swarmllm.pipeline.stage.row_committer import (
    NoRowCommitter,
    RowCommitter,
    RowCommitters,
    TakesOwnStatements,
    digests_of,
)
from swarmllm.pipeline.stage.session_queue import NotFinite
from swarmllm.pipeline.tasks import SpawnsTasks
from swarmllm.swarm.in_memory.signer import InMemorySigner
from swarmllm.swarm.membership.signer import open_signer
from swarmllm.swarm.router import Router
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import decode_job
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.row_commitments import RowsCommitment, is_signed_by, pipeline_digest, signed
from swarmllm_proto.swarm import FetchRows, Stage

MODEL = ModelFile("0" * 64, Path("/nowhere"))
WIDTH = 4
STAGES = tuple(
    Stage(node_id=node_id, start=index, end=index + 1, commits=True)
    for index, node_id in enumerate((A, B, C))
)
PIPELINE = pipeline_digest("r", MODEL.model_id, O, STAGES)


def context(here: str, stages: tuple[Stage, ...] = STAGES, wants: Any = "tokens") -> RequestContext:
    view = RequestView(node_id=here, origin=O, stages=stages, prompt_here=False)
    return RequestContext("r", MODEL, WIDTH, 997, 100, Sampling(max_tokens=100), view, wants=wants)


def rows_at(boundary: int, position: int, n_rows: int) -> np.ndarray:
    numbers = np.arange(position, position + n_rows, dtype=np.float32)
    return np.repeat(numbers[:, None], WIDTH, axis=1) + 1000 * boundary


class Parts:
    """A worker that has so many rows of each boundary, and a router that remembers."""

    def __init__(self, here: str = B, n_rows: int = 1000, stages: tuple[Stage, ...] = STAGES) -> None:
        self.n_rows = n_rows
        self.missing: set[int] = set()
        self.reported: list[tuple[str, RowsCommitment]] = []
        self.waiting: list[Callable[[], Awaitable[None]]] = []
        self.unreachable = ""
        self.ended = EndedRequests()
        self.row_committer = RowCommitter(
            context(here, stages),
            cast(Compute, self),
            cast(Router, self),
            InMemorySigner(here),
            cast(SpawnsTasks, self),
            None,
            self.ended,
        )

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        self.waiting.append(task)

    async def read_journal(self, model: Any, *, request_id: str, end: int, position: int, n_rows: int) -> Any:
        await trio.lowlevel.checkpoint()
        if end in self.missing or position + n_rows > self.n_rows:
            raise WorkerError("not all of these rows are there", kind="position_gap")
        return rows_at(end, position, n_rows)

    async def send(self, node_id: str, header: bytes, payload: Any = b"") -> None:
        await trio.lowlevel.checkpoint()
        if node_id == self.unreachable:
            raise NodeUnreachable("no")
        said = decode_job(header, payload)
        assert isinstance(said, RowsCommitment)
        self.reported.append((node_id, said))

    async def work(self) -> None:
        while self.waiting:
            await self.waiting.pop(0)()

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(said.position, said.n_rows) for node_id, said in self.reported if node_id == O]


async def test_a_stage_signs_for_what_came_and_what_left_and_tells_the_next_one_and_the_origin() -> None:
    parts = Parts()
    parts.row_committer.computed(1, 0, 128)
    await parts.work()
    [(_, said), (_, again)] = parts.reported
    assert {node_id for node_id, _ in parts.reported} == {C, O}
    assert said == again
    assert said.sent == digests_of(rows_at(2, 0, 128))
    assert said.received == digests_of(rows_at(1, 0, 128))
    assert said.sent[:32] == blake3(rows_at(2, 0, 32).astype("<f4").tobytes()).digest()
    assert is_signed_by(said, PIPELINE, B, InMemorySigner(B).verify)


@pytest.mark.parametrize(("here", "sent", "received"), [(A, True, False), (C, False, True)])
async def test_the_first_stage_gets_no_rows_and_the_last_one_sends_none(
    here: str, sent: bool, received: bool
) -> None:
    parts = Parts(here)
    parts.row_committer.computed([A, B, C].index(here), 0, 128)
    await parts.work()
    assert {node_id for node_id, _ in parts.reported} == ({B, O} if here == A else {O})
    said = parts.reported[0][1]
    assert (bool(said.sent), bool(said.received)) == (sent, received)


async def test_rows_are_signed_for_when_there_are_many_and_the_rest_at_the_end() -> None:
    parts = Parts()
    parts.row_committer.computed(1, 0, 127)
    await parts.work()
    assert parts.spans == []
    parts.row_committer.computed(1, 127, 40)
    await parts.work()
    assert parts.spans == [(0, 160)]
    for position in range(167, 288):
        parts.row_committer.computed(1, position, 1)
    await parts.work()
    assert parts.spans == [(0, 160), (160, 128)]
    parts.row_committer.computed(1, 288, 6)
    parts.n_rows = 294
    await parts.work()
    await parts.row_committer.finish(0)
    assert parts.spans == [(0, 160), (160, 128), (288, 6)]
    await parts.row_committer.finish(0)
    assert len(parts.spans) == 3


async def test_jobs_that_came_by_links_count_and_what_is_left_of_them_is_found_at_the_end() -> None:
    """The worker tells of them once a second at most, and does not tell of rows that were guessed rightly."""
    parts = Parts(n_rows=330)
    parts.row_committer.computed(1, 0, 128)
    await parts.work()
    parts.row_committer.ran_by_link(1, 127)
    await parts.work()
    assert parts.spans == [(0, 128)]
    parts.row_committer.ran_by_link(1, 1)
    await parts.work()
    assert parts.spans == [(0, 128), (128, 128)]
    await parts.row_committer.finish(0)
    assert parts.spans == [(0, 128), (128, 128), (256, 32), (288, 32)]


async def test_the_origin_says_how_many_rows_there_are_and_all_that_came_by_links_are_signed_for() -> None:
    """The rows of a guess that was wrong are none of them."""
    parts = Parts(n_rows=179)
    parts.row_committer.computed(1, 0, 140)
    await parts.work()
    await parts.row_committer.finish(175)
    assert parts.spans == [(0, 128), (128, 47)]
    await parts.row_committer.finish(175)
    assert len(parts.spans) == 2


async def test_an_origin_that_names_more_rows_than_there_are_gets_a_signature_for_none_of_the_last() -> None:
    parts = Parts(n_rows=170)
    parts.row_committer.computed(1, 0, 140)
    await parts.work()
    await parts.row_committer.finish(2**31 - 1)
    assert parts.spans == [(0, 128)]


async def test_links_before_any_job_and_of_other_stages_say_nothing() -> None:
    parts = Parts()
    parts.row_committer.ran_by_link(1, 100)
    parts.row_committer.computed(1, 0, 8)
    parts.row_committer.ran_by_link(0, 100)
    await parts.work()
    assert parts.spans == []


async def test_rows_before_the_first_one_that_came_are_not_signed_for() -> None:
    """They were kept from an earlier request."""
    parts = Parts()
    parts.row_committer.computed(1, 70, 160)
    await parts.work()
    assert parts.spans == [(96, 128)]


@pytest.mark.parametrize("missing", [2, 1])
async def test_rows_that_the_worker_does_not_keep_are_not_signed_for(missing: int) -> None:
    parts = Parts(n_rows=64)
    parts.missing = {missing}
    parts.row_committer.computed(1, 0, 64)
    await parts.work()
    await parts.row_committer.finish(0)
    assert [said.received for _, said in parts.reported] == ([] if missing == 2 else [b"", b""])


async def test_who_is_not_reached_keeps_nobody_else_from_being_told() -> None:
    parts = Parts()
    parts.unreachable = C
    parts.row_committer.computed(1, 0, 128)
    await parts.work()
    assert [node_id for node_id, _ in parts.reported] == [O]


async def test_a_next_stage_that_does_not_know_of_it_is_told_nothing() -> None:
    parts = Parts(stages=(*STAGES[:2], Stage(node_id=C, start=2, end=3)))
    parts.row_committer.computed(1, 0, 128)
    await parts.work()
    assert [node_id for node_id, _ in parts.reported] == [O]


def said_by_a(**changes: Any) -> RowsCommitment:
    fields: dict[str, Any] = {"request_id": "r", "stage": 0, "position": 0, "n_rows": 64}
    fields |= {"sent": digests_of(rows_at(1, 0, 64)), "signature": bytes(64)} | changes
    return signed(RowsCommitment(**fields), PIPELINE, InMemorySigner(A).sign)


async def test_what_the_one_before_has_signed_is_kept_for_the_rows_that_came() -> None:
    row_committer = Parts().row_committer
    said = said_by_a()
    assert row_committer.hears(A, said)
    assert row_committer.hears(A, said), "the same again"
    digest = digests_of(rows_at(1, 32, 32))
    assert row_committer.signed_for(1, 32, digest) == said
    assert row_committer.signed_for(1, 32, bytes(32)) is None
    assert row_committer.signed_for(1, 64, digest) is None
    assert row_committer.signed_for(2, 32, digest) is None
    assert row_committer.hears(A, said_by_a(sent=bytes(64))) is False, "something else"
    assert row_committer.signed_for(1, 32, digest) == said


@pytest.mark.parametrize(
    ("sender", "changes"),
    [(C, {}), (A, {"stage": 1}), (A, {"position": 160}), (A, {"sent": b"", "received": bytes(64)})],
)
async def test_what_no_honest_stage_before_says_is_refused(sender: str, changes: dict[str, Any]) -> None:
    assert Parts().row_committer.hears(sender, said_by_a(**changes)) is False  # type: ignore[arg-type]


async def test_another_ones_signature_is_refused() -> None:
    forged = signed(said_by_a(), PIPELINE, InMemorySigner(C).sign)
    assert Parts().row_committer.hears(A, forged) is False


async def test_rows_that_were_refused_are_kept_with_their_signature() -> None:
    parts = Parts()
    parts.row_committer.computed(1, 0, 40)
    rows = rows_at(1, 40, 8)
    rows[3, 1] = np.nan
    stretch = np.concatenate((rows_at(1, 32, 8), rows))
    said = said_by_a(position=32, n_rows=16, sent=digests_of(stretch))
    assert parts.row_committer.refused(1, 40, NotFinite(rows)) == 43
    assert parts.row_committer.refused(1, 90, NotFinite(rows)) == 93
    assert parts.row_committer.hears(A, said)
    await parts.row_committer.finish(0)

    def asked(**changes: Any) -> Any:
        fields = {"request_id": "r", "boundary": 1, "position": 32, "n_tokens": 16} | changes
        return FetchRows(**fields)

    now_s = trio.current_time()
    piece = parts.ended.answer(O, asked(), now_s)
    assert piece is not None
    assert bytes(piece.rows) == stretch.astype("<f4").tobytes()
    assert isinstance(piece.commitment, bytes)
    assert decode_job(piece.commitment) == said
    brief = parts.ended.answer(O, asked(digest_only=True), now_s)
    assert brief is not None
    assert (brief.digest, len(brief.rows)) == (piece.digest, 0)
    for sender, request in (
        (A, asked()),
        (O, asked(boundary=2)),
        (O, asked(n_tokens=8)),
        (O, asked(position=0)),
    ):
        assert parts.ended.answer(sender, request, now_s) is None
    assert parts.ended.answer(O, asked(), now_s + REFUSED_S) is None


def test_what_is_refused_otherwise_has_no_rows_to_keep() -> None:
    assert Parts().row_committer.refused(1, 40, BadTensor("tensor.shape", "no")) == 40
    assert NoRowCommitter().refused(1, 40, NotFinite(np.full((2, WIDTH), np.inf, np.float32))) == 40


def test_so_many_refused_rows_are_kept() -> None:
    ended = EndedRequests()
    for n in range(REFUSED_MAX + 3):
        ended.keep_rows(f"r{n}", RefusedRows(O, 1, 0, 1, bytes(16), None, 0.0))
    ended.keep_rows("large", RefusedRows(O, 1, 0, 1, bytes(2**23), None, 0.0))
    kept = [
        n
        for n in range(REFUSED_MAX + 3)
        if ended.answer(O, FetchRows(request_id=f"r{n}", boundary=1, position=0, n_tokens=1), 1.0)
    ]
    assert kept == list(range(3, REFUSED_MAX + 3))
    assert ended.answer(O, FetchRows(request_id="large", boundary=1, position=0, n_tokens=1), 1.0) is None


def test_so_many_cancellations_are_remembered_and_none_pushes_out_rows() -> None:
    ended = EndedRequests()
    ended.keep_rows("r0", RefusedRows(O, 1, 0, 1, bytes(16), None, 0.0))
    for n in range(CANCELLED_MAX + 2):
        ended.cancel(O, f"r{n}")
    ended.cancel(O, "r2")
    ended.cancel(A, "another")
    known = [ended.is_cancelled(O, f"r{n}") for n in range(CANCELLED_MAX + 2)]
    assert known == [False, False, True, False] + [True] * (CANCELLED_MAX - 2)
    assert ended.is_cancelled(A, "another")
    assert not ended.is_cancelled(O, "another")
    fetch = FetchRows(request_id="r0", boundary=1, position=0, n_tokens=1)
    assert ended.answer(O, fetch, 1.0)
    assert ended.answer(O, fetch, REFUSED_S) is None
    assert len(ended._ended) == CANCELLED_MAX
    ended.keep_rows("r5", RefusedRows(O, 1, 0, 1, bytes(16), None, 0.0))
    assert ended.answer(O, fetch, REFUSED_S) is None
    assert ended.is_cancelled(O, "r5"), "also once its rows are gone"


@pytest.mark.parametrize(
    ("here", "stages", "wants", "signs"),
    [
        (B, STAGES, "tokens", True),
        (O, STAGES, "tokens", False),
        (B, STAGES, "normed", False),
        (A, STAGES[:1], "tokens", False),
        (B, (STAGES[0], Stage(node_id=B, start=1, end=2), STAGES[2]), "tokens", False),
    ],
)
async def test_who_is_asked_to_has_rows_and_sends_them_on(
    here: str, stages: tuple[Stage, ...], wants: Any, signs: bool
) -> None:
    parts = Parts()
    row_committers = RowCommitters(
        cast(Compute, parts),
        cast(Router, parts),
        InMemorySigner(here),
        cast(SpawnsTasks, parts),
        cast(TakesOwnStatements, parts),
    )
    assert isinstance(row_committers.of(context(here, stages, wants), EndedRequests()), RowCommitter) is signs


def test_a_nodes_own_key_signs(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    signer, other = map(open_signer, folders)
    said = signed(said_by_a(), PIPELINE, signer.sign)
    assert is_signed_by(said, PIPELINE, signer.node_id, other.verify)
    assert not is_signed_by(said, PIPELINE, other.node_id, other.verify)
    assert not is_signed_by(said_by_a(), PIPELINE, signer.node_id, other.verify)
