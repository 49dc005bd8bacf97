"""How rows travel between stages: who chooses it, what it does to the text, and what checks make of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import hypothesis.extra.numpy as hnp
import llama_cpp
import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C, D

from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.verdict import Match, compare, distance
from swarmllm.pipeline.prefix.names import PrefixNames
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.route.row_formats import (
    Compression,
    HopLine,
    Packing,
    choose_formats,
    lines_between,
    measured_packing,
)
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.workerpool import ModelFile
from swarmllm_proto import codec
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.swarm import (
    LayerForward,
    NodeCapability,
    ObservedLink,
    PipelineAssignment,
    Stage,
)
from swarmllm_proto.tensors import HEAD, ROW_FORMATS, rounded

from .fakes import Swarm
from .test_guide_over_nodes import QUESTIONS, THIRDS, ask, expected_tokens, guide_swarm

pytestmark = pytest.mark.long

STAGES = tuple(Stage(node_id=node, start=4 * i, end=4 * i + 4) for i, node in enumerate((A, B, C)))
KNOWS = frozenset(ROW_FORMATS)
WIDTH = 64
PACKING = Packing(saved=0.1, seconds_per_byte=1e-8)
"""Pays below 10 MB/s."""
SLOW, FAST = 1e6, 1e8
READS_ALL = NodeCapability(row_formats=ROW_FORMATS[1:])
MAX_ASKED = 60
"""Requests, until one of them was checked."""


def choice(
    compression: Compression,
    *lines: HopLine,
    origin: str = A,
    width: int = WIDTH,
    is_exact: bool = False,
) -> tuple[RowFormat, ...]:
    """`lines`: to each stage from the node before it."""
    senders = (origin, A, B)
    between = {
        (sender, stage.node_id): line for sender, stage, line in zip(senders, STAGES, lines, strict=True)
    }
    return choose_formats(STAGES, origin, compression, between, PACKING, width, is_exact=is_exact)


@pytest.mark.parametrize("speed", [None, SLOW, FAST])
def test_auto_takes_what_changes_no_bit_and_pays_and_nothing_else(speed: float | None) -> None:
    line = HopLine(KNOWS, speed)
    lossless = "lossless" if speed == SLOW else "f32"
    expected = ("f32", lossless, lossless) if speed == SLOW else ()
    assert choice("auto", line, line, line) == expected
    assert choice("off", line, line, line) == ()


def test_lossless_is_packed_until_it_is_known_not_to_pay() -> None:
    unknown, slow, fast = (HopLine(KNOWS, speed) for speed in (None, SLOW, FAST))
    assert choice("lossless", unknown, unknown, fast) == ("f32", "lossless", "f32")
    assert choice("lossless", slow, fast, slow, origin=D) == ("lossless", "f32", "lossless")


def test_q8_0_is_taken_by_name_where_both_know_it_and_the_request_allows_it() -> None:
    new, old = HopLine(KNOWS, FAST), HopLine(frozenset(), SLOW)
    assert choice("q8_0", new, new, new) == ("f32", "q8_0", "q8_0")
    assert choice("q8_0", new, new, old) == ("f32", "q8_0", "f32")
    assert choice("q8_0", new, old, old) == ()
    # What the origin embeds is nobody's to round.
    assert choice("q8_0", new, new, new, origin=D) == ("f32", "q8_0", "q8_0")
    assert choice("q8_0", new, new, new, is_exact=True) == ()
    assert choice("q8_0", new, HopLine(KNOWS, SLOW), new, is_exact=True) == ("f32", "lossless", "f32")
    # Rows of no whole blocks.
    assert choice("q8_0", new, new, new, width=WIDTH - 1) == ()


def test_a_line_is_what_its_ends_say_and_the_receiver_first() -> None:
    def says(formats: tuple[str, ...], **bytes_per_s: float) -> NodeCapability:
        links = tuple(
            ObservedLink(node_id={"a": A, "b": B, "c": C}[name], rtt_s=0.01, bytes_per_s=value)
            for name, value in bytes_per_s.items()
        )
        return NodeCapability(row_formats=formats, observed_links=links)

    said = {
        B: says(("lossless", "q8_0", "of a later version"), a=1e6, c=4e6),
        C: says(("lossless",), b=2e6),
    }
    lines = lines_between(STAGES, A, said, {B: 9e6})
    assert lines[A, B] == HopLine(frozenset({"lossless", "q8_0"}), 1e6)
    assert lines[B, C] == HopLine(frozenset({"lossless"}), 2e6)
    said = {B: says(("lossless",), c=4e6), C: NodeCapability()}
    lines = lines_between(STAGES, A, said, {B: 9e6})
    assert lines[A, B] == HopLine(frozenset({"lossless"}), 9e6)
    assert lines[B, C] == HopLine(frozenset(), 4e6)
    assert lines_between(STAGES, A, {}, {})[A, B] == HopLine(frozenset(), None)


def test_packing_is_measured_and_saves_something() -> None:
    packing = measured_packing(896)
    assert 0.05 < packing.saved < 0.5
    assert packing.pays(1.0)
    assert not packing.pays(1e15)


def assignment(formats: object) -> bytes:
    message = PipelineAssignment(
        request_id="r", model_id="0" * 64, origin=A, stages=STAGES, n_prompt_tokens=3, sampling=Sampling()
    )
    return msgspec.msgpack.encode(
        msgspec.msgpack.decode(codec.encode_request(message)) | {"row_formats": formats}
    )


@pytest.mark.parametrize(
    ("formats", "field"),
    [
        (["f32", "q8_0"], "row_formats"),
        ([], "row_formats"),
        (["q8_0", "f32", "f32"], "row_formats[0]"),
        (["f32", "q4_0", "f32"], "row_formats"),
        ("q8_0", "row_formats"),
    ],
)
def test_an_assignment_with_other_formats_is_refused_by_its_field(formats: object, field: str) -> None:
    with pytest.raises(BadMessage) as refusal:
        codec.decode_request(assignment(formats))
    assert field in f"{refusal.value.field} {refusal.value.reason}"
    assert codec.decode_request(assignment(["lossless", "q8_0", "f32"]))


def test_what_was_computed_from_rounded_rows_has_other_names() -> None:
    """Only of the stages behind the rounding: the others compute what they always do."""
    tokens = np.arange(64, dtype=np.int32)

    def names(*formats: RowFormat) -> list[bytes]:
        of_request = PrefixNames(bytes(32), "0" * 64, STAGES, formats)
        return [of_request.of_node(node, tokens)[0].names for node in (A, B, C)]

    exact, last, both = names(), names("f32", "f32", "q8_0"), names("f32", "q8_0", "q8_0")
    assert names("lossless", "lossless", "f32") == exact
    assert [one == other for one, other in zip(exact, last, strict=True)] == [True, True, False]
    assert [one == other for one, other in zip(exact, both, strict=True)] == [True, False, False]
    assert last[2] != both[2] != names("f32", "q8_0", "f32")[2] != last[2]


finite = hnp.arrays(np.float32, (4, WIDTH), elements=st.floats(-1e4, 1e4, width=32))


@given(finite, hnp.arrays(np.float32, (4, WIDTH), elements=st.floats(-1, 1, width=32)), finite)
def test_rounding_makes_no_honest_stage_look_worse(
    computed: np.ndarray, noise: np.ndarray, came_in: np.ndarray
) -> None:
    """Another node's kernels are off by `noise`; what it sends is rounded, what is recomputed is not."""
    theirs = computed + noise
    plain = distance(computed, theirs, came_in)
    # (Its scales may be larger by what its own largest values are off by.)
    allowed = plain * (1 + np.sqrt(32) / 200) + 1e-9
    assert distance(computed, rounded(theirs), came_in, is_rounded=True) <= allowed
    assert compare(computed, rounded(computed), came_in, is_rounded=True) is Match.EQUAL


def test_rounding_hides_no_other_numbers() -> None:
    source = np.random.default_rng(0)
    came_in = source.standard_normal((8, WIDTH)).astype(np.float32)
    right = came_in + source.standard_normal((8, WIDTH)).astype(np.float32)
    others = {
        "nothing computed": came_in,
        "zeros": np.zeros_like(right),
        "another scale": right * np.float32(1.2),
        "one huge value per block": np.where(np.arange(WIDTH) % 32 == 0, np.float32(1e6), right),
    }
    for name, lie in others.items():
        for reported in (lie, rounded(lie)):
            assert compare(right, reported.astype(np.float32), came_in, is_rounded=True) is Match.WRONG, name


# Over real workers.


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@pytest.fixture(scope="module")
def uncut() -> Iterator[llama_cpp.Llama]:
    llama = llama_cpp.Llama(
        str(GUIDE_PATH), n_ctx=1024, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False
    )
    yield llama
    llama.close()


def hear_rows(swarm: Swarm) -> list[tuple[str, int, int]]:
    """(sender, dtype tag, rows) of every tensor between nodes, as it is sent from now on."""
    heard: list[tuple[str, int, int]] = []

    def listen(node_id: str) -> None:
        router, send = swarm[node_id].router, swarm[node_id].router.send

        async def tell(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = codec.decode_job(header, payload)
            if isinstance(message, LayerForward) and message.step == "layer":
                heard.append((node_id, HEAD.unpack_from(payload)[3], message.n_tokens))
            await send(receiver, header, payload)

        router.send = tell  # type: ignore[method-assign]

    for node_id in swarm.nodes:
        listen(node_id)
    return heard


async def reported(swarm: Swarm, question: str, kill: str = "", n_tokens: int = 40) -> tuple[list[int], bool]:
    """Tokens, and whether the answer says that they are exact. `kill`: a node whose worker dies meanwhile."""
    prompt = Prompt(messages=[{"role": "user", "content": question}])
    greedy = Sampling(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    tokens = []
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(prompt, swarm.entry, greedy) as generation:
            async for piece in generation:
                tokens.append(piece.token)
                if kill and piece.index == 7:
                    (worker,) = swarm[kill].pool.statistics()
                    os.kill(worker.pid, signal.SIGKILL)
    assert generation.n_recoveries == bool(kill)
    await swarm.quiet()
    return tokens, generation.is_exact


@pytest.mark.slow
async def test_lossless_rows_give_the_text_of_the_uncut_model(
    tmp_path: Path, entry: CatalogueEntry, uncut: llama_cpp.Llama
) -> None:
    async with guide_swarm(tmp_path, entry, THIRDS, compression="lossless") as swarm:
        await swarm.tell(A, dict.fromkeys((B, C), READS_ALL))
        heard = hear_rows(swarm)
        tokens, _ = await ask(swarm, A, QUESTIONS[1])
        prompt = await swarm[A].pool.tokenize(
            ModelFile(entry.model_id, entry.path), messages=[{"role": "user", "content": QUESTIONS[1]}]
        )
        assert tokens == expected_tokens(uncut, prompt.tolist())
        assert {tag for _, tag, n_rows in heard if n_rows > 1} == {4}
        assert (await reported(swarm, QUESTIONS[0]))[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [B, C])
async def test_a_rounded_stream_that_breaks_goes_on_with_the_same_bits(
    tmp_path: Path, entry: CatalogueEntry, victim: str
) -> None:
    """The stage before has kept what it sent: the one that is built again gets the same rows."""
    holdings = {**THIRDS, D: THIRDS[victim]}
    async with guide_swarm(tmp_path, entry, holdings, compression="q8_0") as swarm:
        await swarm.tell(A, dict.fromkeys((B, C, D), READS_ALL))
        heard = hear_rows(swarm)
        plan = await swarm[A].pipelines.plan(entry, RequestSize())
        assert (plan.row_formats, plan.is_exact) == (("f32", "q8_0", "q8_0"), False)
        # So many that the reader is not the last to know that a node is gone.
        undisturbed = await reported(swarm, QUESTIONS[0], n_tokens=300)
        assert not undisturbed[1]
        assert {(sender, tag) for sender, tag, _ in heard} == {(A, 3), (B, 3)}
        heard.clear()
        assert await reported(swarm, QUESTIONS[0], kill=victim, n_tokens=300) == undisturbed
        assert {tag for _, tag, _ in heard} == {3}


@pytest.mark.slow
async def test_hops_of_a_node_that_knows_no_format_stay_exact(
    tmp_path: Path, entry: CatalogueEntry, uncut: llama_cpp.Llama
) -> None:
    async with guide_swarm(tmp_path, entry, THIRDS, compression="q8_0") as swarm:
        # B is in the middle of all hops.
        await swarm.tell(A, {B: NodeCapability(), C: READS_ALL})
        heard = hear_rows(swarm)
        tokens, is_exact = await reported(swarm, QUESTIONS[0])
        prompt = await swarm[A].pool.tokenize(
            ModelFile(entry.model_id, entry.path), messages=[{"role": "user", "content": QUESTIONS[0]}]
        )
        expected = expected_tokens(uncut, prompt.tolist())
        assert (tokens[: len(expected)], is_exact) == (expected, True)
        assert {tag for _, tag, _ in heard} == {0}


@pytest.mark.slow
async def test_rounded_rows_are_never_kept_for_a_request_that_is_exact(
    tmp_path: Path, entry: CatalogueEntry, uncut: llama_cpp.Llama
) -> None:
    """The same long prompt first with rounded rows, then without: its kept rows are not taken."""
    question = " ".join(QUESTIONS * 3)
    async with guide_swarm(tmp_path, entry, THIRDS, compression="q8_0") as swarm:
        await swarm.tell(A, dict.fromkeys((B, C), READS_ALL))
        heard = hear_rows(swarm)
        assert not (await reported(swarm, question))[1]
        n_rows = sum(n_rows for _, _, n_rows in heard)
        heard.clear()
        # Other rounded ones take them.
        assert not (await reported(swarm, question))[1]
        assert sum(n_rows for _, _, n_rows in heard) <= n_rows - 2 * 64
        await swarm.tell(A, {node_id: NodeCapability() for node_id in (B, C)})
        heard.clear()
        tokens, is_exact = await reported(swarm, question)
        assert sum(n_rows for _, _, n_rows in heard) == n_rows
        prompt = await swarm[A].pool.tokenize(
            ModelFile(entry.model_id, entry.path), messages=[{"role": "user", "content": question}]
        )
        expected = expected_tokens(uncut, prompt.tolist())
        assert (tokens[: len(expected)], is_exact) == (expected, True)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["lossless", "q8_0"])
async def test_honest_stages_are_right_to_the_bit_however_rows_travel(
    tmp_path: Path, entry: CatalogueEntry, compression: Compression
) -> None:
    """Each is checked by this node, which holds all layers, or by another holder."""
    holdings = {**THIRDS, D: "4:8"}
    async with guide_swarm(tmp_path, entry, holdings, compression=compression, check_rate=1.0) as swarm:
        await swarm.tell(A, dict.fromkeys((B, C, D), READS_ALL))
        questions = QUESTIONS * 2
        for number in count():
            before = swarm[A].pipelines.statistics()
            # On a busy machine the first checks may all be dropped.
            if number >= len(questions) and (before.checked or number == MAX_ASKED):
                break
            await reported(swarm, questions[number % len(questions)] + "?" * number, n_tokens=20)
            with trio.fail_after(DEADLINE_S):
                while True:
                    counts = swarm[A].pipelines.statistics()
                    if counts.checked + counts.checks_dropped > before.checked + before.checks_dropped:
                        break
                    await trio.sleep(0.05)
        counts = swarm[A].pipelines.statistics()
        assert (counts.checks_wrong, counts.checks_disputed) == (0, 0)
        assert counts.checked
        events = [
            (entry.trust_event, entry.detail)
            for node_id in (B, C, D)
            for entry in swarm[A].trust.explain(node_id).recent
        ]
        assert {detail for event, detail in events if event is TrustEvent.CHECKED} == {"equal bits"}
        assert {event for event, _ in events} <= {TrustEvent.SERVED, TrustEvent.CHECKED}
