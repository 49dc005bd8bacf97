"""The transition table: complete, closed, and row for row what the job processor's states promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from node_ids import A, B, O

from bench.common.arithmetic import FakePool
from swarmllm.errors import NodeUnreachable
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.job import ComputeStep, Job, RequestView
from swarmllm.pipeline.origin.output import Chunk
from swarmllm.pipeline.processor import (
    TRANSITIONS,
    JobOutcome,
    JobState,
    advance,
    after_embed,
    after_head,
    after_layers,
    after_validating,
    destination,
    diagram,
    next_state,
)
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.job_runner import JobRunner
from swarmllm.state_table import UnknownTransition
from swarmllm.workerpool import ModelFile
from swarmllm.workerpool.forward_result import ForwardResult
from swarmllm_proto.codec import decode_job
from swarmllm_proto.ipc import Sampling, Token
from swarmllm_proto.swarm import Stage

from .fakes import open_swarm

DOCUMENT = Path(__file__).parents[2] / "docs" / "job-processor.md"
ROWS = np.zeros((1, 4), np.float32)
TOKENS = np.zeros(1, np.int32)


def view(node_id: str, *node_ids: str, origin: str = O) -> RequestView:
    """Stages of two layers each on `node_ids`, as `node_id` sees them."""
    stages = [Stage(node_id=owner, start=2 * i, end=2 * i + 2) for i, owner in enumerate(node_ids)]
    return RequestView(node_id=node_id, origin=origin, stages=stages, prompt_here=node_id == origin)


def held(*ranges: str) -> list[LayerRange]:
    return [LayerRange.parse(text) for text in ranges]


VIEWS = [
    view(O, A),
    view(O, O, A),
    view(O, A, O),
    view(A, A),
    view(A, A, B),
    view(A, A, A),
    view(A, A, B, A),
    view(B, A, B),
]
MADE_BY_THE_DRIVER = {
    (JobState.PROCESS_LAYERS, JobOutcome.PASSED_ON),
    (JobState.HEAD, JobOutcome.PASSED_ON),
    (JobState.SEND, JobOutcome.SENT),
}


def jobs() -> Iterator[Job]:
    choices = product(
        ComputeStep, (0, 1, 2, 3), (0, 4), (None, 7), (None, ROWS), (None, 0, 1), (None, "stop")
    )
    for step, stage, left, token, tensor, until, finish_reason in choices:
        yield Job(
            step,
            stage=stage,
            prefill_left=left,
            token=token,
            tensor=tensor,
            until=until,
            finish_reason=finish_reason,  # type: ignore[arg-type]
        )


def test_the_table_has_what_can_come_of_each_state_and_nothing_else() -> None:
    """Of every kind of job in every kind of pipeline."""
    made = set(MADE_BY_THE_DRIVER)
    for job, seen in product(jobs(), VIEWS):
        for loaded in ([], held("0:2"), held("2:4"), held("0:2", "2:4", "4:6")):
            made.add((JobState.VALIDATING, after_validating(job, seen, loaded)))
        made.add((JobState.EMBED, after_embed(job, seen)))
        if job.stage <= seen.last:
            made.add((JobState.PROCESS_LAYERS, after_layers(job, seen)))
            made.add((JobState.HEAD, after_head(job, seen)))
    assert made == set(TRANSITIONS)


@pytest.mark.parametrize("state", list(JobState))
def test_what_cannot_come_of_a_state_raises_and_leaves_the_job_as_it_was(state: JobState) -> None:
    outcomes = [outcome for outcome in JobOutcome if (state, outcome) not in TRANSITIONS]
    assert outcomes
    for outcome in outcomes:
        job = Job(ComputeStep.LAYER, position=5, n_tokens=2, token=7, tensor=ROWS)
        before = replace(job)
        with pytest.raises(UnknownTransition, match=f"{state.name} cannot end with {outcome.name}"):
            advance(job, state, outcome, view(A, A, B))
        assert job == before


async def test_an_outcome_passes_the_table_before_anybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is missing stops the walk where nothing has left the node yet."""
    sent: list[str] = []

    class Listening:
        async def send(self, node_id: str, header: bytes, payload: bytes = b"") -> None:
            sent.append(node_id)

    class Pool(FakePool):
        async def forward(self, *args: object, **call: object) -> ForwardResult:  # type: ignore[override]
            return ForwardResult(None, Token(request_id="r", index=0, token=7), b"x", 0.0)

    missing = (JobState.HEAD, JobOutcome.TOKEN_ELSEWHERE)
    without = {pair: state for pair, state in TRANSITIONS.items() if pair != missing}
    monkeypatch.setattr("swarmllm.pipeline.processor.TRANSITIONS", without)
    seen = view(B, A, B)
    context = RequestContext("r", ModelFile("m", Path("/nowhere")), 4, 997, 1, Sampling(), seen)
    runner = JobRunner(context, Pool("2:4"), Listening(), None)  # type: ignore[arg-type]
    with pytest.raises(UnknownTransition, match="HEAD cannot end with TOKEN_ELSEWHERE"):
        await runner.run(Job(ComputeStep.LAYER, stage=1, position=5, n_tokens=1, tensor=ROWS))
    assert sent == []


async def test_a_worker_is_told_how_to_sample_with_the_first_sample_and_never_again() -> None:
    """Of prompt, tokens, and rows that come once more behind a token."""
    reported: list[tuple[str, Sampling | None, tuple[int, ...]]] = []

    class Pool(FakePool):
        async def forward(self, *args: object, **call: Any) -> ForwardResult:  # type: ignore[override]
            reported.append((call["want"], call["sampling"], call["generated"]))
            token = Token(request_id="r", index=0, token=7, finish_reason="stop")
            return ForwardResult(None, token if call["want"] == "token" else None, b"x", 0.0)

    class Deaf:
        async def send(self, node_id: str, header: bytes, payload: bytes = b"") -> None:
            pass

    sampling, before = Sampling(seed=5), (1, 2)
    seen = view(B, A, B)
    context = RequestContext(
        "r", ModelFile("m", Path("/nowhere")), 4, 997, 4, sampling, seen, generated=before
    )
    runner = JobRunner(context, Pool("2:4"), Deaf(), None)  # type: ignore[arg-type]
    for left in (1, 0, 0, 1, 0):
        job = Job(ComputeStep.LAYER, stage=1, position=5, n_tokens=1, prefill_left=left, tensor=ROWS)
        await runner.run(job)
    nothing = (None, ())
    assert reported == [
        ("none", *nothing),
        ("token", sampling, before),
        ("token", *nothing),
        ("none", *nothing),
        ("token", *nothing),
    ]


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    reaching_end = {JobState.DONE}
    for _ in JobState:
        reaching_end |= {state for (state, _), after in TRANSITIONS.items() if after in reaching_end}
    assert reaching_end == set(JobState)
    assert {JobState.VALIDATING, *TRANSITIONS.values()} == set(JobState)
    assert not [state for state, _ in TRANSITIONS if state is JobState.DONE]
    assert {outcome for _, outcome in TRANSITIONS} == set(JobOutcome)


def layers_done(job: Job, seen: RequestView) -> JobState:
    return advance(job, JobState.PROCESS_LAYERS, after_layers(job, seen), seen)


def sampled_from(job: Job, seen: RequestView) -> JobState:
    return advance(job, JobState.HEAD, after_head(job, seen), seen)


def validated(job: Job, seen: RequestView, loaded: list[LayerRange]) -> JobState:
    return next_state(JobState.VALIDATING, after_validating(job, seen, loaded))


class TestValidating:
    def test_to_done_without_the_needed_segment(self) -> None:
        job = Job(ComputeStep.LAYER, stage=1, tensor=ROWS)
        assert validated(job, view(B, A, B), []) is JobState.DONE
        assert validated(job, view(B, A, B), held("0:2")) is JobState.DONE
        assert validated(job, view(B, A, B), held("0:3")) is JobState.DONE
        # Of what is held any part can run.
        assert validated(job, view(B, A, B), held("0:4")) is JobState.PROCESS_LAYERS

    def test_to_done_where_the_stage_is_not_in_the_pipeline_or_not_here(self) -> None:
        assert (
            validated(Job(ComputeStep.LAYER, stage=7, tensor=ROWS), view(B, B), held("0:2")) is JobState.DONE
        )
        assert validated(Job(ComputeStep.LAYER, tensor=ROWS), view(B, A, B), held("0:2")) is JobState.DONE

    def test_to_done_without_rows(self) -> None:
        assert validated(Job(ComputeStep.LAYER), view(A, A), held("0:2")) is JobState.DONE

    @pytest.mark.parametrize("step", [ComputeStep.TOKENIZE, ComputeStep.NORM])
    def test_to_done_at_steps_where_no_job_rests(self, step: ComputeStep) -> None:
        assert validated(Job(step, tensor=ROWS), view(A, A), held("0:2")) is JobState.DONE

    def test_to_done_at_head_where_the_head_is_not(self) -> None:
        job = Job(ComputeStep.HEAD, stage=1)
        assert validated(job, view(A, A, B), held("0:2")) is JobState.DONE
        assert validated(job, view(B, A, B), []) is JobState.DONE

    def test_to_done_at_head_with_chunks_left_away_from_the_origin(self) -> None:
        assert validated(Job(ComputeStep.HEAD, prefill_left=4), view(A, A), held("0:2")) is JobState.DONE

    def test_to_head_at_head_with_prefill_complete(self) -> None:
        assert validated(Job(ComputeStep.HEAD, stage=1), view(B, A, B), held("2:4")) is JobState.HEAD

    def test_to_embed_at_head_with_chunks_left(self) -> None:
        assert validated(Job(ComputeStep.HEAD, prefill_left=4), view(O, A, B), []) is JobState.EMBED

    def test_to_embed_with_a_token_at_the_first_stage_or_the_origin(self) -> None:
        job = Job(ComputeStep.EMBED, token=7)
        assert validated(job, view(A, A, B), held("0:2")) is JobState.EMBED
        assert validated(job, view(O, A, B), []) is JobState.EMBED
        assert validated(job, view(B, A, B), held("2:4")) is JobState.DONE
        assert validated(job, view(A, A, B), []) is JobState.DONE

    def test_to_process_layers_otherwise(self) -> None:
        job = Job(ComputeStep.LAYER, stage=1, tensor=ROWS)
        assert validated(job, view(B, A, B), held("2:3", "3:4")) is JobState.PROCESS_LAYERS


class TestEmbed:
    def test_to_done_when_every_chunk_is_on_its_way(self) -> None:
        assert next_state(JobState.EMBED, after_embed(Job(ComputeStep.HEAD), view(O, A))) is JobState.DONE

    def test_to_done_where_a_token_was_not_embedded(self) -> None:
        job = Job(ComputeStep.EMBED, token=7)
        assert next_state(JobState.EMBED, after_embed(job, view(A, A, B))) is JobState.DONE

    async def test_to_done_if_the_update_cannot_be_sent_or_nobody_has_the_next_layer(self) -> None:
        """The walk ends in SEND, and the origin's side is told who is lost."""
        lost: list[str] = []

        class Unreachable:
            async def send(self, node_id: str, header: bytes, payload: object = b"") -> None:
                raise NodeUnreachable(f"{node_id} is gone")

        class Side:
            prompt = TOKENS
            pictures = None

            def next_chunk(self) -> Chunk:
                return Chunk(0, 1, 0)

            def lost(self, node_id: str) -> None:
                lost.append(node_id)

        context = RequestContext("r", ModelFile("m", Path("/nowhere")), 4, 997, 1, Sampling(), view(O, A, B))
        runner = JobRunner(context, FakePool(), Unreachable(), Side())  # type: ignore[arg-type]
        with pytest.raises(NodeUnreachable, match=f"{A} is gone"):
            await runner.run(Job(ComputeStep.HEAD, prefill_left=1))
        assert lost == [A]

    def test_to_send_when_the_first_layer_is_remote(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=ROWS)
        assert next_state(JobState.EMBED, after_embed(job, view(O, A))) is JobState.SEND
        job = Job(ComputeStep.EMBED, token=7)
        assert next_state(JobState.EMBED, after_embed(job, view(O, A))) is JobState.SEND

    def test_to_process_layers_when_it_is_local(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=TOKENS)
        assert next_state(JobState.EMBED, after_embed(job, view(A, A, B))) is JobState.PROCESS_LAYERS


class TestProcessLayers:
    def test_to_send_when_the_next_layers_are_remote(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=ROWS)
        assert layers_done(job, view(A, A, B)) is JobState.SEND
        assert (job.stage, destination(job, view(A, A, B))) == (1, B)

    def test_again_when_they_are_local(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=ROWS)
        assert layers_done(job, view(A, A, A)) is JobState.PROCESS_LAYERS
        assert job.stage == 1

    def test_at_the_last_layer_the_step_becomes_head_and_the_next_iteration_decides(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=ROWS, stage=1)
        seen = view(B, A, B)
        assert layers_done(job, seen) is JobState.VALIDATING
        assert job.step is ComputeStep.HEAD
        assert validated(job, seen, held("2:4")) is JobState.HEAD

    def test_a_chunk_that_is_not_the_last_ends_with_a_note_to_the_origin(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=ROWS, stage=1, prefill_left=3)
        assert layers_done(job, view(B, A, B)) is JobState.SEND
        assert destination(job, view(B, A, B)) == O

    def test_where_the_origin_runs_the_last_stage_the_next_chunk_follows(self) -> None:
        job = Job(ComputeStep.LAYER, tensor=ROWS, stage=1, prefill_left=3)
        seen = view(O, A, O)
        assert layers_done(job, seen) is JobState.VALIDATING
        assert validated(job, seen, held("2:4")) is JobState.EMBED


class TestHead:
    @staticmethod
    def sampled(stage: int, **changes: object) -> Job:
        job = Job(ComputeStep.HEAD, stage=stage, position=10, n_tokens=5, token=7, timings=())
        for name, value in changes.items():
            setattr(job, name, value)
        return job

    def test_to_done_at_the_end_of_generation(self) -> None:
        job = self.sampled(1, finish_reason="stop")
        assert sampled_from(job, view(B, A, B)) is JobState.DONE

    async def test_to_done_if_the_client_is_gone(self) -> None:
        """Its walk is cancelled wherever it is, and the slot is freed."""
        pools = {A: FakePool("0:6"), B: FakePool("6:12")}
        async with open_swarm(pools) as swarm:
            async with swarm[A].pipelines.generate(
                Prompt(text="who is there?"), swarm.entry, Sampling(max_tokens=4000)
            ) as generation:
                await anext(generation)
            await swarm.quiet()
            assert not pools[B].slots
            assert generation.finish_reason is None

    def test_to_send_when_the_first_stage_is_elsewhere(self) -> None:
        job = self.sampled(1)
        assert sampled_from(job, view(B, A, B)) is JobState.SEND
        assert destination(job, view(B, A, B)) == A
        assert (job.step, job.stage, job.position, job.n_tokens) == (ComputeStep.EMBED, 0, 15, 1)

    def test_to_embed_when_the_first_stage_is_here(self) -> None:
        job = self.sampled(2)
        assert sampled_from(job, view(A, A, B, A)) is JobState.EMBED
        assert (job.stage, job.position) == (0, 15)

    def test_to_process_layers_when_this_stage_is_also_the_first(self) -> None:
        job = self.sampled(0)
        assert sampled_from(job, view(A, A)) is JobState.PROCESS_LAYERS
        assert (job.step, job.position, job.n_tokens) == (ComputeStep.LAYER, 15, 1)


class TestPassedOn:
    """The worker has sent its result on by a link; what it says is what a daemon gets to know."""

    @staticmethod
    async def sent(seen: RequestView, job: Job, result: ForwardResult) -> list[tuple[str, str]]:
        """(receiver, kind of message)"""
        messages: list[tuple[str, str]] = []

        class Pool(FakePool):
            async def forward(self, *args: object, **call: object) -> ForwardResult:  # type: ignore[override]
                return result

        class Listening:
            async def send(self, node_id: str, header: bytes, payload: bytes = b"") -> None:
                messages.append((node_id, type(decode_job(header, payload)).__name__))

        context = RequestContext("r", ModelFile("m", Path("/nowhere")), 4, 997, 1, Sampling(), seen)
        runner = JobRunner(context, Pool("0:2", "2:4"), Listening(), None)  # type: ignore[arg-type]
        await runner.run(job)
        return messages

    async def test_from_process_layers_to_done(self) -> None:
        job = Job(ComputeStep.LAYER, position=5, n_tokens=1, tensor=ROWS)
        passed_on = ForwardResult(None, None, b"", 0.0, onward=True)
        assert await self.sent(view(A, A, B), job, passed_on) == []
        kept = ForwardResult(ROWS, None, b"", 0.1)
        job = Job(ComputeStep.LAYER, position=5, n_tokens=1, tensor=ROWS)
        assert await self.sent(view(A, A, B), job, kept) == [(B, "LayerForward")]

    async def test_from_head_to_done_and_an_origin_without_a_link_is_told(self) -> None:
        token = Token(request_id="r", index=3, token=7)
        passed_on = ForwardResult(None, token, b"x", 0.1, onward=True)

        def last() -> Job:
            return Job(ComputeStep.LAYER, stage=1, position=5, n_tokens=1, tensor=ROWS)

        assert await self.sent(view(B, A, B, origin=A), last(), passed_on) == []
        assert await self.sent(view(B, A, B), last(), passed_on) == [(O, "StreamingToken")]
        here = replace(passed_on, onward=False)
        reported = await self.sent(view(B, A, B), last(), here)
        assert reported == [(A, "LayerForward"), (O, "StreamingToken")]


def test_the_documented_diagram_is_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in DOCUMENT.read_text(), (
        "docs/job-processor.md is out of date: paste what `python -m swarmllm.pipeline.processor` prints"
    )
