"""The job processor: one table, from which the tests and the diagram in docs/job-processor.md are drawn.

A walk on a node starts in VALIDATING and runs until DONE. In each state the driver computes, then one of the
functions here looks at the job and returns its outcome (a JobOutcome). The outcome passes the table
(`advance`) before the job moves on and before anybody is told; a pair that is not in the table is a defect
and raises.

The states and conditions are those of the Language Pipes job processor, read for pipelines whose last stage
owns the head. There the origin owns embedding and head, and every token passes through it; here libllama's
head comes with the last layers, so the node that samples sends the token to the client's node and, in the
same breath, straight back to the first stage: the origin's distance is not paid per token. Three
consequences:

- "the end model" at HEAD is the last stage, not the origin;
- a job can arrive as a bare token that the first stage embeds, hence VALIDATING -> EMBED also for a token;
- chunks of the prompt that are not the last end at the last stage with a note to the origin (SEND at HEAD),
  which brings the origin to HEAD with chunks left, and so to EMBED for its next chunk. Several chunks are
  on their way at once; when all have left, such a note leads nowhere (EMBED -> DONE).

PROCESS_LAYERS at the last layer goes back to VALIDATING: the step has become HEAD, and "the next iteration
decides".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from msgspec import UNSET

from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.job import ComputeStep, Job, RequestView
from swarmllm.state_table import UnknownTransition
from swarmllm_proto.identifiers import NodeId


class JobState(StrEnum):
    VALIDATING = "VALIDATING"
    EMBED = "EMBED"
    PROCESS_LAYERS = "PROCESS_LAYERS"
    HEAD = "HEAD"
    SEND = "SEND"
    DONE = "DONE"


class JobOutcome(StrEnum):
    """The outcome of a state; the text is the edge's label in the diagram."""

    INCOMPLETE = "the job, its pipeline or a needed part of it is missing"
    READY_FOR_HEAD = "at HEAD, prefill complete"
    READY_FOR_CHUNK = "at HEAD, chunks of the prompt left"
    READY_TO_EMBED = "a prompt's first chunk or a sampled token to embed"
    READY_FOR_LAYERS = "layers to run"
    NOTHING_TO_EMBED = "every chunk is on its way"
    NEXT_LOCAL = "next layers are here"
    NEXT_REMOTE = "next layers, or the origin that waits for them, are elsewhere"
    LAST_LAYER = "all layers done: the step becomes HEAD"
    FINISHED = "end of generation, or the client is gone"
    TOKEN_EMBEDDED_HERE = "next token: the first stage is here"
    TOKEN_TO_LAYERS = "next token: this very stage is also the first"
    TOKEN_ELSEWHERE = "next token: the first stage is elsewhere"
    SENT = "handed over"
    PASSED_ON = "the worker has sent the job on by a link, or had had it by one"


TRANSITIONS: Final[dict[tuple[JobState, JobOutcome], JobState]] = {
    (JobState.VALIDATING, JobOutcome.INCOMPLETE): JobState.DONE,
    (JobState.VALIDATING, JobOutcome.READY_FOR_HEAD): JobState.HEAD,
    (JobState.VALIDATING, JobOutcome.READY_FOR_CHUNK): JobState.EMBED,
    (JobState.VALIDATING, JobOutcome.READY_TO_EMBED): JobState.EMBED,
    (JobState.VALIDATING, JobOutcome.READY_FOR_LAYERS): JobState.PROCESS_LAYERS,
    (JobState.EMBED, JobOutcome.INCOMPLETE): JobState.DONE,
    (JobState.EMBED, JobOutcome.NOTHING_TO_EMBED): JobState.DONE,
    (JobState.EMBED, JobOutcome.NEXT_REMOTE): JobState.SEND,
    (JobState.EMBED, JobOutcome.NEXT_LOCAL): JobState.PROCESS_LAYERS,
    (JobState.PROCESS_LAYERS, JobOutcome.NEXT_REMOTE): JobState.SEND,
    (JobState.PROCESS_LAYERS, JobOutcome.NEXT_LOCAL): JobState.PROCESS_LAYERS,
    (JobState.PROCESS_LAYERS, JobOutcome.LAST_LAYER): JobState.VALIDATING,
    (JobState.PROCESS_LAYERS, JobOutcome.PASSED_ON): JobState.DONE,
    (JobState.HEAD, JobOutcome.FINISHED): JobState.DONE,
    (JobState.HEAD, JobOutcome.TOKEN_EMBEDDED_HERE): JobState.EMBED,
    (JobState.HEAD, JobOutcome.TOKEN_ELSEWHERE): JobState.SEND,
    (JobState.HEAD, JobOutcome.TOKEN_TO_LAYERS): JobState.PROCESS_LAYERS,
    (JobState.HEAD, JobOutcome.PASSED_ON): JobState.DONE,
    (JobState.SEND, JobOutcome.SENT): JobState.DONE,
}


def next_state(state: JobState, outcome: JobOutcome) -> JobState:
    """Raises UnknownTransition."""
    try:
        return TRANSITIONS[state, outcome]
    except KeyError:
        raise UnknownTransition(f"{state.name} cannot end with {outcome.name}") from None


def after_validating(job: Job, view: RequestView, loaded: Iterable[LayerRange]) -> JobOutcome:
    """`loaded`: what this node's worker holds of the model."""
    if not 0 <= job.stage <= view.last:
        return JobOutcome.INCOMPLETE
    match job.step:
        case ComputeStep.HEAD if job.prefill_left > 0:
            return JobOutcome.READY_FOR_CHUNK if view.prompt_here else JobOutcome.INCOMPLETE
        case ComputeStep.HEAD:
            head_here = job.stage == view.last and _can_run(job.stage, view, loaded)
            return JobOutcome.READY_FOR_HEAD if head_here else JobOutcome.INCOMPLETE
        case ComputeStep.EMBED:
            can_embed = view.prompt_here or (job.token is not None and _can_run(0, view, loaded))
            return JobOutcome.READY_TO_EMBED if can_embed else JobOutcome.INCOMPLETE
        case ComputeStep.LAYER if job.tensor is not None and _can_run(job.stage, view, loaded):
            return JobOutcome.READY_FOR_LAYERS
        case _:
            return JobOutcome.INCOMPLETE


def after_embed(job: Job, view: RequestView) -> JobOutcome:
    """The job then holds rows (or, for a token whose first stage is elsewhere, the token), or nothing was
    left."""
    if job.tensor is None and job.token is None:
        return JobOutcome.NOTHING_TO_EMBED
    if not view.is_here(0):
        return JobOutcome.NEXT_REMOTE
    return JobOutcome.INCOMPLETE if job.tensor is None else JobOutcome.NEXT_LOCAL


def after_layers(job: Job, view: RequestView) -> JobOutcome:
    """`job.stage` has been computed."""
    if _has_next_stage(job, view):
        return JobOutcome.NEXT_LOCAL if view.is_here(job.stage + 1) else JobOutcome.NEXT_REMOTE
    return JobOutcome.NEXT_REMOTE if job.prefill_left > 0 and not view.prompt_here else JobOutcome.LAST_LAYER


def after_head(job: Job, view: RequestView) -> JobOutcome:
    """`job.token` has been sampled."""
    if job.finish_reason is not None:
        return JobOutcome.FINISHED
    if job.stage == 0:
        return JobOutcome.TOKEN_TO_LAYERS
    return JobOutcome.TOKEN_EMBEDDED_HERE if view.is_here(0) else JobOutcome.TOKEN_ELSEWHERE


def advance(job: Job, state: JobState, outcome: JobOutcome, view: RequestView) -> JobState:
    """The next state. Moves the job on to what is computed next: after layers the next stage or, at the last
    one, HEAD; after the head the next position, at the first stage. Raises UnknownTransition, with the job as
    it was."""
    after = next_state(state, outcome)
    if outcome is JobOutcome.PASSED_ON or outcome is JobOutcome.FINISHED:
        return after
    if state is JobState.PROCESS_LAYERS:
        if _has_next_stage(job, view):
            job.stage += 1
        else:
            job.step = ComputeStep.HEAD
    elif state is JobState.HEAD:
        job.step = ComputeStep.LAYER if outcome is JobOutcome.TOKEN_TO_LAYERS else ComputeStep.EMBED
        job.stage = 0
        job.position += job.n_tokens
        job.n_tokens, job.guesses = 1, ()
        job.number = job.fresh = UNSET
        job.tensor = None
        job.timings = ()
    return after


def destination(job: Job, view: RequestView) -> NodeId:
    """Where SEND takes the job."""
    return view.origin if job.step is ComputeStep.HEAD else view.stages[job.stage].node_id


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {JobState.VALIDATING.value}"]
    lines += [
        f"    {state.value} --> {after.value}: {outcome.value.replace(':', ' -')}"
        for (state, outcome), after in TRANSITIONS.items()
    ]
    lines.append(f"    {JobState.DONE.value} --> [*]")
    return "\n".join(lines)


def _has_next_stage(job: Job, view: RequestView) -> bool:
    return job.stage < (view.last if job.until is None else min(job.until, view.last))


def _can_run(stage: int, view: RequestView, loaded: Iterable[LayerRange]) -> bool:
    return view.is_here(stage) and covers(loaded, view.layers(stage))


if __name__ == "__main__":
    print(diagram())
