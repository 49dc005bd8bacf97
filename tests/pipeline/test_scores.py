"""How likely a prompt's own tokens were, from one node and over several, against libllama alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from node_ids import A, B, C

from bench.common.arithmetic import FakePool
from swarmllm.errors import InvalidRequest, RemoteError
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.assignment import assign
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.origin.prompt_rows import ScoresChain
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.workerpool import ModelFile
from swarmllm_proto.codec import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    encode_scores,
)
from swarmllm_proto.ipc import Sampling, TokenLogprob
from swarmllm_proto.swarm import PipelineAck, PipelineAssignment, PrefillProgress, Stage
from swarmllm_proto.tensors import encode_tensor

from .fakes import FakeNode, open_swarm
from .test_guide_over_nodes import THIRDS, guide_swarm
from .test_rows import NobodyWaits

TEXT = "A pipeline is an ordered list of stages that covers all layers of a model exactly once. " * 3
N_TOP = 3
GREEDY = Sampling(temperature=0.0, max_tokens=4, logprobs=True, top_logprobs=N_TOP)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@pytest.fixture(scope="module")
def uncut() -> tuple[list[int], np.ndarray]:
    """The text's tokens, and f64 [n, n_vocab]: log-probabilities after each."""
    llama = llama_cpp.Llama(
        str(GUIDE_PATH), n_ctx=1024, n_threads=1, logits_all=True, flash_attn=True, verbose=False
    )
    try:
        tokens = llama.tokenize(TEXT.encode(), special=True)
        for start in range(0, len(tokens), 16):
            llama.eval(tokens[start : start + 16])
        logits = llama.scores[: len(tokens)].astype(np.float64)
    finally:
        llama.close()
    logits -= logits.max(axis=1, keepdims=True)
    return tokens, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


async def score(node: FakeNode, entry: CatalogueEntry, prompt: Prompt) -> Generation:
    async with node.pipelines.generate(prompt, entry, GREEDY) as generation:
        _ = [piece async for piece in generation]
    return generation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("holdings", "shape"),
    [
        ({A: "0:12"}, "local"),
        (THIRDS, "chain"),
        ({A: "", B: "0:12"}, "chain"),
        ({A: "6:12", B: "0:6"}, "chain"),
    ],
    ids=["here", "three nodes", "elsewhere", "turned round"],
)
async def test_scores_are_those_of_the_uncut_model(
    tmp_path: Path,
    entry: CatalogueEntry,
    uncut: tuple[list[int], np.ndarray],
    holdings: dict[str, str],
    shape: str,
) -> None:
    tokens, expected = uncut
    prompt = Prompt(text=TEXT, top_logprobs=N_TOP, is_answered=False, field="prompt")
    async with guide_swarm(tmp_path, entry, holdings, n_slots=2) as swarm:
        for _ in range(3):  # more often than there are slots: one that was kept would be missed
            found = await score(swarm[A], entry, prompt)
        await swarm.quiet()
    assert found.prompt is not None
    others = found.prompt.others
    assert (found.shape, found.n_generated, found.finish_reason) == (shape, 0, "length")
    layers = sorted((stage.layers.start, stage.layers.end) for stage in found.route)
    assert (layers[0][0], layers[-1][1], len(layers)) == (0, 12, sum(map(bool, holdings.values())))
    assert found.n_prompt_tokens == len(tokens) == len(others) + 1
    assert [row[0].token for row in others] == tokens[1:]
    reported = [row[0].logprob for row in others]
    # Chunks of another size are summed in another order.
    np.testing.assert_allclose(reported, expected[np.arange(len(others)), tokens[1:]], rtol=0, atol=2e-2)
    for row, likely in zip(others, expected, strict=False):
        assert [each.logprob for each in row[1:]] == sorted((each.logprob for each in row[1:]), reverse=True)
        np.testing.assert_allclose([e.logprob for e in row[1:]], np.sort(likely)[::-1][:N_TOP], atol=2e-2)
    assert (found.prompt.first + b"".join(row[0].piece for row in others).decode()).endswith(TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [100, 128])
async def test_exact_ones_have_the_same_bits_over_every_cut(
    tmp_path: Path, entry: CatalogueEntry, chunk_tokens: int
) -> None:
    """Of the scores and of rows, on each route, and of scores before an answer, too."""
    prompt = Prompt(text=TEXT * 2, top_logprobs=N_TOP, field="prompt")
    tokens = np.random.default_rng(3).integers(300, 2000, 200).astype(np.int32)
    reported = []
    for i, holdings in enumerate(({A: "0:12"}, THIRDS, {A: "", B: "0:12"}, {A: "6:12", B: "0:6"})):
        folder = tmp_path / str(i)
        folder.mkdir()
        is_set = i == 1
        async with guide_swarm(folder, entry, holdings, chunk_tokens=chunk_tokens, exact=is_set) as swarm:
            await score(swarm[A], entry, prompt)
            asked = replace(GREEDY, exact=not is_set)
            async with swarm[A].pipelines.generate(prompt, entry, asked) as found:
                answer = [(piece.token, piece.logprobs) async for piece in found]
            assert found.is_apart
            rows = await swarm[A].pipelines.rows(tokens, entry, is_exact=not is_set)
            reported.append((found.prompt, answer, rows.values.tobytes()))
            await swarm.quiet()
    assert reported == [reported[0]] * 4


@pytest.mark.slow
async def test_an_answer_follows_its_scored_prompt(tmp_path: Path, entry: CatalogueEntry) -> None:
    async with guide_swarm(tmp_path, entry, THIRDS) as swarm:
        scored = await score(swarm[A], entry, Prompt(text=TEXT, top_logprobs=0, field="prompt"))
        alone = await score(swarm[A], entry, Prompt(text=TEXT, field="prompt"))
        single = await score(swarm[A], entry, Prompt(tokens=[72], top_logprobs=2, field="prompt"))
        await swarm.quiet()
    assert scored.prompt is not None
    assert single.prompt is not None
    assert alone.prompt is None
    assert scored.n_generated == alone.n_generated > 0
    assert len(scored.prompt.others) == scored.n_prompt_tokens - 1
    assert (single.prompt.others, single.n_prompt_tokens) == ((), 1)


async def test_who_keeps_prompts_here_tells_no_tokens_to_others() -> None:
    """The last stage's node would have to know them."""
    prompt = Prompt(tokens=[1, 2, 3], top_logprobs=0, is_answered=False, field="prompt")
    settings = PipelineSettings(local_embedding_privacy=True)
    pools = {A: FakePool("0:6"), B: FakePool("6:12")}
    async with open_swarm(pools, settings=settings) as swarm:
        with pytest.raises(InvalidRequest, match="local_embedding_privacy") as refusal:
            await score(swarm[A], swarm.entry, prompt)
        assert refusal.value.field == "prompt"
        await swarm.quiet()


@pytest.mark.parametrize(
    "changed",
    [{"scored": (1, 2)}, {"scored": (1, 2, 10**6)}, {"wants": "tokens"}],
    ids=["too few", "no such token", "tokens"],
)
async def test_an_assignment_whose_scored_tokens_cannot_be_meant_is_refused(
    changed: dict[str, Any],
) -> None:
    async with open_swarm({A: FakePool("0:12"), B: FakePool("0:12")}) as swarm:
        stages = (Stage(node_id=B, start=0, end=12),)
        assignment = PipelineAssignment(
            request_id="r",
            model_id=swarm.entry.model_id,
            origin=A,
            stages=stages,
            n_prompt_tokens=3,
            sampling=Sampling(),
            wants="normed",
            scored=(1, 2, 3),
        )
        for each, is_fine in ((replace(assignment, **changed), False), (assignment, True)):
            body = await swarm[B].pipelines.on_request(A, encode_request(each))
            ack = decode_response(body)
            assert isinstance(ack, PipelineAck)
            assert (ack.accepted, "scored token" in ack.reason) == (is_fine, not is_fine)


async def test_only_the_last_stage_is_told_what_is_scored() -> None:
    reported: dict[str, PipelineAssignment] = {}

    class Telephone:
        node_id = A

        async def request(self, node_id: str, body: bytes, *, timeout_s: float) -> bytes:
            request = decode_request(body)
            assert isinstance(request, PipelineAssignment)
            reported[node_id] = request
            return encode_response(PipelineAck(request_id="r", accepted=True))

    stages = (Stage(node_id=B, start=0, end=6), Stage(node_id=C, start=6, end=12))
    assignment = PipelineAssignment(
        request_id="r",
        model_id="ab" * 32,
        origin=A,
        stages=stages,
        n_prompt_tokens=2,
        sampling=Sampling(),
        wants="normed",
        scored=(1, 2),
    )
    await assign(Telephone(), assignment, timeout_s=5)  # type: ignore[arg-type]
    assert (reported[B].scored, reported[C].scored) == (UNSET, (1, 2))


def a_chain() -> ScoresChain:
    """Of eight tokens, 10 to 17, each of which is scored with one likely token; both chunks are under
    way."""
    stages = (Stage(node_id=A, start=0, end=6), Stage(node_id=B, start=6, end=12))
    view = RequestView(A, A, stages, True)
    sampling = Sampling(top_logprobs=1)
    scored = tuple(range(11, 19))
    context = RequestContext(
        "r", ModelFile("m", GUIDE_PATH), 4, 997, 8, sampling, view, wants="normed", scored=scored
    )
    chain = ScoresChain(
        context,
        np.arange(10, 18, dtype=np.int32),
        chunk_tokens=4,
        silence_timeout_s=1,
        look_after_s=5,
        stall_handler=NobodyWaits(),
        nicknames={A: "", B: ""},
    )
    chain.start(type("Deaf", (), {"offer": lambda *_: None, "stop": lambda *_: None})())  # type: ignore[arg-type]
    assert chain.next_chunk()
    assert chain.next_chunk()
    return chain


def scores_of(*tokens: int, likely: int = 5, n_top: int = 1) -> bytes:
    top = [TokenLogprob(likely, -0.5, b"x")] * n_top
    return encode_scores(tuple((TokenLogprob(token, -1.0, b"x"), *top) for token in tokens))


@pytest.mark.parametrize(
    ("position", "payload"),
    [
        (4, b""),
        (4, b"nonsense"),
        (4, scores_of(11, 12, 13, 15)),
        (4, scores_of(11, 12, 13, 14, 15)),
        (3, scores_of(11, 12, 13, 14)),
        (8, scores_of(15, 16, 17, 18)),
        (4, scores_of(11, 12, 13, 14, n_top=2)),
        (4, scores_of(11, 12, 13, 14, likely=997)),
        (4, encode_scores(((TokenLogprob(11, -1.0, b"x" * 2000),) * 2,) * 8)),
    ],
)
async def test_scores_that_cannot_be_meant_end_the_request(position: int, payload: bytes) -> None:
    chain = a_chain()
    chain.receive(B, PrefillProgress(request_id="r", position=position), payload)
    assert isinstance(chain.failure, RemoteError)
    assert chain.blamed.culprit == B


async def test_scores_that_can_be_meant_are_taken() -> None:
    chain = a_chain()
    chain.receive(B, PrefillProgress(request_id="r", position=4), scores_of(11, 12, 13, 14))
    assert (chain.failure, chain.is_complete) == (None, False)
    chain.receive(B, PrefillProgress(request_id="r", position=8), scores_of(15, 16, 17, 18))
    parts = await chain.chunks()
    assert [row[0].token for part in parts for row in part] == list(range(11, 19))


async def test_who_does_not_know_of_scores_and_sends_rows_is_not_blamed() -> None:
    chain = a_chain()
    rows = b"".join(encode_tensor(np.ones((4, 4), np.float32)))
    chain.receive(B, PrefillProgress(request_id="r", position=4), rows)
    assert isinstance(chain.failure, RemoteError)
    assert chain.blamed.culprit is None
    assert f"node {B} runs a version that does not score" in chain.failure.message
