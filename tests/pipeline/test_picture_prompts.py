"""How a prompt with pictures becomes tokens and rows, and in which chunks these leave."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A
from vision_models import picture

from bench.common.arithmetic import fake_entry
from swarmllm.errors import ContextFull, InvalidRequest, NoPipeline
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.projector import Projector
from swarmllm.pictures import Picture, PromptPictures
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.output import InvalidReport, PromptWindow
from swarmllm.pipeline.origin.pictures import FIRST_ROW_ID, PictureRows, embedded, with_row_ids
from swarmllm.pipeline.origin.prompts import Prompts, read_pictures
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.vision.detail import PictureScaler
from swarmllm.pipeline.vision.encoders import Encoders
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.peers.trust import NeutralTrust
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool.encoders import EncodedPicture
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.swarm import PipelineAssignment, Stage

BOS = 1
N_EMBD = 3
PROJECTOR = Projector(path="/mm", size_bytes=1, mtime_ns=1, blake3="ab" * 32, family="mlp", n_embd=N_EMBD)
SEEN = [picture(20, 20, 1), picture(20, 20, 2)]


class FakeEncoder:
    """Letters are tokens. A picture is the token 7, two rows, and two rows of another tile."""

    def __init__(self) -> None:
        self.scaled: list[tuple[str, int]] = []

    async def tokenize(self, model: ModelFile, *, text: str, place: str) -> np.ndarray:
        return np.array([BOS] * (place != "later") + [ord(letter) for letter in text], np.int32)

    async def apply_template(self, model: ModelFile, messages: list[dict[str, Any]], *others: object) -> str:
        return "".join(message["content"] for message in messages)

    async def encode_picture(self, model: ModelFile, projector: Projector, shown: Picture) -> EncodedPicture:
        number = SEEN.index(shown) + 1
        rows = np.arange(4 * N_EMBD, dtype=np.float32).reshape(4, N_EMBD) + 100 * number
        return EncodedPicture(np.array([7, -1, -1, -1, -1], np.int32), rows, (1, 3, 5))

    async def recode_picture(self, shown: Picture, *, side_max: int = 0) -> bytes:
        self.scaled.append((shown.digest, side_max))
        return SEEN[1].data

    async def embed(self, model: ModelFile, tokens: np.ndarray) -> np.ndarray:
        assert tokens.max() < FIRST_ROW_ID, "no worker knows such a token"
        return np.repeat(tokens[:, None], N_EMBD, 1).astype(np.float32)


def seeing() -> CatalogueEntry:
    return replace(fake_entry(), projector=PROJECTOR)


def asking(text: str, *, as_messages: bool = False) -> Prompt:
    by_marker = {marker: each for marker, each in zip(("AAA", "BBB"), SEEN, strict=True) if marker in text}
    pictures = PromptPictures(by_marker)
    if as_messages:
        return Prompt(messages=[{"role": "user", "content": text}], pictures=pictures)
    return Prompt(text=text, pictures=pictures)


async def read(prompt: Prompt, n_ctx: int = 100) -> tuple[np.ndarray, PictureRows]:
    compute: Any = FakeEncoder()
    router: Any = SimpleNamespace(node_id=A)
    encoders = Encoders(
        compute,
        router,
        Registry(A),
        PipelineSettings(),
        PipelineStatistics(),
        NeutralTrust(),
        ByteBudget(),
        Suspects(),
        Nobody(),
    )
    return await read_pictures(compute, encoders, seeing(), prompt, n_ctx)


class Nobody:
    async def stages_for(self, entry: CatalogueEntry) -> tuple[Stage, ...]:
        raise NoPipeline("nobody has these layers")


async def test_rows_stand_between_the_tokens_of_the_text_which_begins_once() -> None:
    tokens, pictures = await read(asking("xAAAyzBBB"))
    known = [BOS, ord("x"), 7, None, None, None, None, ord("y"), ord("z"), 7, None, None, None, None]
    assert [None if token >= FIRST_ROW_ID else token for token in tokens.tolist()] == known
    assert pictures.positions.tolist() == [at for at, token in enumerate(known) if token is None]
    assert pictures.ends == (3, 5, 7, 10, 12, 14)
    rows = await embedded(FakeEncoder(), None, tokens, 0, pictures, as_ids=True)  # type: ignore[arg-type]
    assert rows[:, 0].tolist() == [1, 120, 7, 100, 103, 106, 109, 121, 122, 7, 200, 203, 206, 209]
    for first in range(len(tokens)):
        part = tokens[first : first + 3]
        some = await embedded(FakeEncoder(), None, part, first, pictures, as_ids=False)  # type: ignore[arg-type]
        assert np.array_equal(some, rows[first : first + 3])
    text = await embedded(FakeEncoder(), None, tokens[:3], 0, pictures, as_ids=True)  # type: ignore[arg-type]
    assert text.dtype == np.int32
    assert int(tokens.max()) < 2**31


async def test_a_prompt_that_begins_with_a_picture_begins_as_every_text_does() -> None:
    tokens, pictures = await read(asking("AAAx"))
    assert tokens[:2].tolist() == [BOS, 7]
    assert pictures.ends == (2, 4, 6)
    again, _ = await read(asking("AAAx", as_messages=True))
    assert np.array_equal(again, tokens)


async def test_a_picture_of_low_detail_is_scaled_down_once_and_only_where_it_is_larger() -> None:
    compute = FakeEncoder()
    scaler = PictureScaler(compute)  # type: ignore[arg-type]
    for side_max, becomes in ((16, SEEN[1]), (20, None), (0, None), (16, SEEN[1])):
        shown = replace(SEEN[0], side_max=side_max)
        assert await scaler.scaled(shown, "field") == (becomes or shown)
    assert compute.scaled == [(SEEN[0].digest, 16)]
    compute.recode_picture = damaged  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest) as caught:
        await scaler.scaled(replace(SEEN[0], side_max=8), "messages[0]")
    assert caught.value.field == "messages[0]"
    prompt = asking("xAAAy")
    prompt = replace(prompt, pictures=PromptPictures({"AAA": replace(SEEN[0], side_max=16)}))
    low, _ = await read(prompt)
    expected, _ = await read(replace(prompt, pictures=PromptPictures({"AAA": SEEN[1]})))
    assert np.array_equal(low, expected)


async def damaged(shown: Picture, *, side_max: int = 0) -> bytes:
    raise InvalidRequest("the file is damaged", field="payload")


async def test_what_stands_for_a_picture_follows_from_picture_and_place() -> None:
    (one, at_one), (same, at_same), (other, at_other), (later, at_later) = [
        await read(asking(text)) for text in ("xAAAy", "xAAAz", "xBBBy", "xxAAAy")
    ]
    assert np.array_equal(one[:-1], same[:-1])
    (mark,), (later_mark,) = at_one.marks, at_later.marks
    assert at_same.marks == (mark,)
    assert at_other.marks[0].digest != mark.digest
    assert (later_mark.position, later_mark.digest) == (mark.position + 1, mark.digest)
    assert not set(one[3:7].tolist()) & set(other[3:7].tolist())
    assert np.array_equal(one[3:7], later[4:8])


async def test_pictures_beyond_the_context_are_not_encoded() -> None:
    with pytest.raises(ContextFull, match="has room for 7 here"):
        await read(asking("xAAAyBBB"), n_ctx=7)


async def test_a_standby_gets_the_pictures_too() -> None:
    tokens, pictures = await read(asking("xAAAy"))
    request = OriginRequest("req_1", seeing(), tokens, Sampling(), pictures=pictures)
    way = Assembly((Stage(node_id=A, start=0, end=12),), (None,))
    standby = request.attempt(way, request.assignment(way, A, is_standby=True))
    assert standby.request.pictures is pictures
    assert standby.context.picture_runs == pictures.runs


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.lists(st.integers(1, 60), unique=True).map(sorted),
    st.integers(0, 10),
)
def test_chunks_end_where_pictures_do_and_may_leave_again(
    n_tokens: int, chunk_tokens: int, ends: list[int], n_known: int
) -> None:
    n_known = min(n_known, n_tokens - 1)
    window = PromptWindow(n_tokens, chunk_tokens, 10**6, n_known, ends)
    chunks = []
    while (chunk := window.next_chunk()) is not None:
        chunks.append(chunk)
        assert 1 <= chunk.n_tokens <= chunk_tokens
        last = chunk.position + chunk.n_tokens
        assert not [end for end in ends if chunk.position < end < last]
        assert last + chunk.left == n_tokens
    begins = [chunk.position for chunk in chunks]
    assert begins == sorted(begins)
    assert sum(chunk.n_tokens for chunk in chunks) == n_tokens - n_known
    for position in range(n_known, n_tokens):
        if position in begins:
            window.rewind(position)
            again = []
            while (chunk := window.next_chunk()) is not None:
                again.append(chunk)
            assert again == chunks[begins.index(position) :]
        else:
            with pytest.raises(InvalidReport):
                window.rewind(position)


def test_rows_that_see_each_other_are_one_chunk_and_no_grid_is_cut_when_it_leaves_again() -> None:
    runs = (PictureRun(5, 12, 4), PictureRun(20, 10, is_causal=False))
    window = PromptWindow(33, 6, 10**6, ends=(5, 17, 20, 30), runs=runs)
    chunks = []
    while (chunk := window.next_chunk()) is not None:
        chunks.append((chunk.position, chunk.n_tokens))
    assert chunks == [(0, 5), (5, 6), (11, 6), (17, 3), (20, 10), (30, 3)]
    window.rewind(20)
    assert window.n_sent == 20
    window.rewind(11)
    assert window.n_sent == 5
    with pytest.raises(InvalidReport):
        window.rewind(6)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((0, 7, 2), "grid_width"),
        ((0, 513, 0, False), "n_rows"),
    ],
)
def test_runs_that_cannot_be_are_refused(fields: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=f"field `{reason}`"):
        PictureRun(*fields)


def test_an_assignment_has_runs_that_follow_each_other_within_the_prompt() -> None:
    runs = PictureRun(2, 6, 3), PictureRun(8, 2, is_causal=False)
    stages = (Stage(node_id=A, start=0, end=2),)
    assigned = partial(
        PipelineAssignment, request_id="r", model_id="0" * 64, origin=A, stages=stages, sampling=Sampling()
    )
    assert assigned(n_prompt_tokens=10, picture_runs=runs).picture_runs == runs
    for n_rows, wrong in ((9, runs), (10, runs[::-1]), (10, (runs[0], runs[0]))):
        with pytest.raises(ValueError, match=r"field `picture_runs\[\d\]`"):
            assigned(n_prompt_tokens=n_rows, picture_runs=wrong)


def test_only_rows_of_pictures_get_ids_and_every_token_stays() -> None:
    tokens = np.array([0, 5, -1, 0, -1], np.int32)
    run = with_row_ids(tokens, b"a picture")
    assert run[[0, 1, 3]].tolist() == [0, 5, 0]
    assert (run[[2, 4]] >= FIRST_ROW_ID).all()
    assert run[2] != run[4]
    assert run.tolist() == with_row_ids(tokens, b"a picture").tolist()
    assert run.tolist() != with_row_ids(tokens, b"another").tolist()


@pytest.mark.parametrize("with_picture", [False, True])
async def test_an_answer_that_has_begun_stands_behind_the_conversation(with_picture: bool) -> None:
    prompt = replace(asking("xAAA" if with_picture else "xy", as_messages=True), begun="Hel")
    if with_picture:
        tokens, _ = await read(prompt)
    else:
        prompts: Any = Prompts(FakeEncoder(), None, PipelineSettings())  # type: ignore[arg-type]
        tokens, _ = await prompts.read(prompt, seeing(), Sampling())
        assert len(tokens) == await prompts.count(prompt, seeing())
    assert tokens.tolist()[:2] == [BOS, ord("x")]
    assert tokens.tolist()[-3:] == [ord(letter) for letter in "Hel"]


async def test_an_answer_cannot_be_begun_behind_a_thought_that_the_template_opens() -> None:
    prompt = replace(asking("x<think>\n", as_messages=True), begun="Hel")
    prompts: Any = Prompts(FakeEncoder(), None, PipelineSettings())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        await prompts.read(prompt, seeing(), Sampling())
    assert caught.value.field == "messages"
