"""Who is told a prompt, to guess from it: the last stage that guesses, where the origin allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from node_ids import A, B, C

from bench.common.arithmetic import FakePool, fake_entry, uncut
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.answered_prompts import PROMPTS_MAX, AnsweredPrompts
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import TELL_PROMPT_TOKENS_MAX, PipelineAck, PipelineAssignment, Stage, TellPrompt
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, open_swarm

TEXT = "what follows from this?"
N_TOKENS = 6
MODEL = ModelId("a" * 64)
PLAIN, GUESSES = PipelineSettings(), PipelineSettings(guesses=True)
TELLS = PipelineSettings(guesses=True, tells_prompt=True)
FIRST_HERE, LAST_HERE = {A: "0:6", B: "6:12"}, {A: "6:12", B: "0:6"}


@dataclass
class Hearing:
    prompts: list[list[int]]

    is_refused: bool = False

    def tell_prompt(self, context: RequestContext, prompt: Tensor) -> None:
        self.prompts.append(prompt.tolist())

    async def is_seated(self, request_id: str, stage: int, timeout_s: float) -> bool:
        return not self.is_refused

    def lacks_seat(self, request_id: str, stage: int) -> bool:
        return self.is_refused


def listen(swarm: Swarm) -> dict[str, list[list[int]]]:
    """The prompts that workers are told from here on, by node id."""
    heard: dict[str, list[list[int]]] = {node_id: [] for node_id in swarm.nodes}
    for node_id, node in swarm.nodes.items():
        node.pipelines._sessions.links = Hearing(heard[node_id])
    return heard


@pytest.mark.parametrize(
    ("holdings", "origin", "last", "is_told"),
    [
        (FIRST_HERE, TELLS, PLAIN, False),
        (FIRST_HERE, TELLS, GUESSES, True),
        (FIRST_HERE, GUESSES, GUESSES, False),
        (LAST_HERE, GUESSES, GUESSES, True),
        (LAST_HERE, PLAIN, GUESSES, False),
        ({A: "0:6", B: "0:12"}, TELLS, GUESSES, False),
    ],
    ids=["no guesses there", "allowed", "not allowed", "here", "no guesses here", "one stage"],
)
async def test_the_last_stage_is_told_where_it_guesses_and_may_know(
    holdings: dict[str, str], origin: PipelineSettings, last: PipelineSettings, is_told: bool
) -> None:
    pools = {node_id: FakePool(ranges) for node_id, ranges in holdings.items()}
    async with open_swarm(pools, settings={A: origin, B: last}) as swarm:
        heard, text = listen(swarm), ""
        sampling = Sampling(max_tokens=N_TOKENS)
        prompt = Prompt(text=TEXT)
        async with swarm[A].pipelines.generate(prompt, swarm.entry, sampling) as generation:
            async for piece in generation:
                text += piece.text
        await swarm.quiet()
        assert text == await uncut(TEXT, N_TOKENS)
        reported, other = (A, B) if holdings is LAST_HERE else (B, A)
        tokens = (await swarm[A].pipelines.prompts.read(prompt, swarm.entry, sampling))[0].tolist()
    assert heard == {reported: [tokens] if is_told else [], other: []}


@pytest.mark.parametrize(
    ("holdings", "origin", "n_told"),
    [(FIRST_HERE, TELLS, 2), (FIRST_HERE, GUESSES, 0), (LAST_HERE, TELLS, 1)],
    ids=["first here", "not allowed", "first elsewhere"],
)
async def test_a_prompt_that_was_answered_before_is_told_with_the_assignment_too(
    holdings: dict[str, str], origin: PipelineSettings, n_told: int
) -> None:
    """The answer that it had comes to the first stage then, which has to know of the request."""
    pools = {node_id: FakePool(ranges) for node_id, ranges in holdings.items()}
    sampling, last = Sampling(max_tokens=N_TOKENS), B if holdings is FIRST_HERE else A
    async with open_swarm(pools, settings={A: origin, B: GUESSES}) as swarm:
        heard, told = listen(swarm), []
        for text in (TEXT, TEXT, f"{TEXT} And this?"):
            n_before, answer = len(heard[last]), ""
            async with swarm[A].pipelines.generate(Prompt(text=text), swarm.entry, sampling) as generation:
                async for piece in generation:
                    answer += piece.text
            await swarm.quiet()
            assert answer == await uncut(text, N_TOKENS)
            told.append(len(heard[last]) - n_before)
        others = [heard[node_id] for node_id in swarm.nodes if node_id != last]
    assert told == [min(n_told, 1), n_told, min(n_told, 1)]
    assert others == [[]]


async def test_no_prompt_is_told_where_the_first_stage_has_no_seat() -> None:
    """The answer that it had before would come to a worker that knows nothing of the request."""
    pools = {node_id: FakePool(ranges) for node_id, ranges in FIRST_HERE.items()}
    sampling = Sampling(max_tokens=N_TOKENS)
    async with open_swarm(pools, settings={A: TELLS, B: GUESSES}) as swarm:
        heard = listen(swarm)
        for n_told in (1, 1):
            async with swarm[A].pipelines.generate(Prompt(text=TEXT), swarm.entry, sampling) as generation:
                assert "".join([piece.text async for piece in generation]) == await uncut(TEXT, N_TOKENS)
            await swarm.quiet()
            assert len(heard[B]) == n_told
            swarm[A].pipelines._sessions.links = Hearing([], is_refused=True)


def test_only_the_same_stages_have_answered_a_prompt() -> None:
    here, other = Stage(node_id=A, start=0, end=6), Stage(node_id=C, start=0, end=6)
    last = Stage(node_id=B, start=6, end=12)
    prompt = np.array([1, 2, 3], np.int32)
    prompts = AnsweredPrompts()
    prompts.answered(MODEL, (here, last), prompt)
    assert prompts.has(MODEL, (here, last), prompt)
    assert not prompts.has(MODEL, (other, last), prompt)
    assert not prompts.has(MODEL, (here, last), prompt[:2])
    assert not prompts.has(ModelId("b" * 64), (here, last), prompt)
    for i in range(PROMPTS_MAX):
        if i == PROMPTS_MAX // 2:
            prompts.answered(MODEL, (here, last), prompt)
        prompts.answered(MODEL, (here, last), np.array([i], np.int32))
    assert len(prompts) == PROMPTS_MAX
    assert prompts.has(MODEL, (here, last), prompt), "the one that was answered longest ago goes"


@pytest.mark.parametrize(
    ("changed", "is_of_use"),
    [
        ({}, True),
        ({"sampling": Sampling(exact=True)}, False),
        ({"tokens": np.zeros(TELL_PROMPT_TOKENS_MAX, np.int32)}, True),
        ({"tokens": np.zeros(TELL_PROMPT_TOKENS_MAX + 1, np.int32)}, False),
        ({"pictures": object()}, False),
    ],
    ids=["plain", "exact", "long", "too long", "with a picture"],
)
def test_prompts_are_told_where_they_are_of_use(changed: dict[str, Any], is_of_use: bool) -> None:
    fields = {"tokens": np.array([4, 5], np.int32), "sampling": Sampling(), **changed}
    request = OriginRequest("r", fake_entry(), **fields)
    two = (Stage(node_id=C, start=0, end=4), Stage(node_id=B, start=4, end=8))
    assert request.prompt_for_guesses(two) == (fields["tokens"].tobytes() if is_of_use else b"")
    assert request.prompt_for_guesses((Stage(node_id=B, start=0, end=8),)) == b""


def reported(*tokens: int, request_id: str = "r") -> TellPrompt:
    return TellPrompt(request_id=request_id, tokens=np.array(tokens, "<i4").tobytes())


REFUSED = {
    "of nobody": (A, reported(1, 2, 3, request_id="other"), "no such request"),
    "of another origin": (C, reported(1, 2, 3), "no such request"),
    "too few": (A, reported(1, 2), "2 tokens of a prompt of 3"),
    "negative": (A, reported(1, -1, 3), "token ids lie in"),
    "no such token": (A, reported(1, 2, 10**6), "token ids lie in"),
}


@pytest.mark.parametrize("case", [*REFUSED, "last stage elsewhere", "of use"])
async def test_a_prompt_that_cannot_be_meant_is_refused_and_not_guessed_from(case: str) -> None:
    sender, message, reason = REFUSED.get(case, (A, reported(1, 2, 3), ""))
    here, next_one = Stage(node_id=B, start=6, end=12), Stage(node_id=A, start=0, end=6)
    stages = (next_one, here)
    holdings = {A: "0:6", B: "6:12", C: ""}
    if case == "last stage elsewhere":
        holdings, reason = {A: "6:12", B: "0:6", C: ""}, "nothing guesses here"
        stages = (Stage(node_id=B, start=0, end=6), Stage(node_id=A, start=6, end=12))
    pools = {node_id: FakePool(*ranges.split()) for node_id, ranges in holdings.items()}
    async with open_swarm(pools, settings=TELLS) as swarm:
        heard, answer = listen(swarm), swarm[B].pipelines.on_request
        assignment = PipelineAssignment(
            request_id="r",
            model_id=swarm.entry.model_id,
            origin=A,
            stages=stages,
            n_prompt_tokens=3,
            sampling=Sampling(),
        )
        ack = decode_response(await answer(A, encode_request(assignment)))
        assert isinstance(ack, PipelineAck)
        assert (ack.accepted, ack.guesses is True) == (True, case != "last stage elsewhere")
        ack = decode_response(await answer(sender, encode_request(message)))
        assert isinstance(ack, PipelineAck)
        assert (ack.accepted, reason in ack.reason) == (not reason, True)
    assert heard[B] == ([] if reason else [[1, 2, 3]])


async def test_a_prompt_that_is_assigned_to_another_stage_than_the_last_is_not_guessed_from() -> None:
    pools = {A: FakePool("6:12"), B: FakePool("0:6")}
    async with open_swarm(pools, settings=TELLS) as swarm:
        heard = listen(swarm)
        assignment = PipelineAssignment(
            request_id="r",
            model_id=swarm.entry.model_id,
            origin=A,
            stages=(Stage(node_id=B, start=0, end=6), Stage(node_id=A, start=6, end=12)),
            n_prompt_tokens=3,
            sampling=Sampling(),
            prompt=np.array([1, 2, 3], "<i4").tobytes(),
        )
        ack = decode_response(await swarm[B].pipelines.on_request(A, encode_request(assignment)))
        assert isinstance(ack, PipelineAck)
        assert ack.accepted
    assert heard[B] == []


def test_a_prompt_of_broken_tokens_is_refused_at_the_edge() -> None:
    with pytest.raises(ValueError, match=r"`prompt`: 5 bytes for 2 tokens"):
        PipelineAssignment(
            request_id="r",
            model_id=MODEL,
            origin=A,
            stages=(Stage(node_id=A, start=0, end=6),),
            n_prompt_tokens=2,
            sampling=Sampling(),
            prompt=b"12345",
        )
    with pytest.raises(ValueError, match=r"`tokens`: 5 bytes"):
        TellPrompt(request_id="r", tokens=b"12345")
