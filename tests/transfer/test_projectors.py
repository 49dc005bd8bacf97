"""The file of a projector goes from node to node by its BLAKE3."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio
from node_ids import A, B, node_id_named
from vision_models import projector

from swarmllm.errors import BadModel, ModelNotFound, NodeUnreachable, StoreFull
from swarmllm.models import build_manifest
from swarmllm.models.projector_store import ProjectorStore
from swarmllm.transfer.projector_fetch import most_given
from swarmllm_proto.identifiers import Digest, ModelId
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, Piece, ProjectorAnnounce

from .transfer_nodes import MODEL, SETTINGS, Node, Twist, World, open_world

TAKER = node_id_named("taker")
C = node_id_named("c")
N_PIECES = 5


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """A projector for the model, and random bytes behind it."""
    model = tmp_path / "model.gguf"
    model.write_bytes(MODEL)
    made = projector(tmp_path / "made.gguf", "janus_pro", build_manifest(model).n_embd).read_bytes()
    return made + random.Random(5).randbytes((N_PIECES - 1) * PIECE_MAX + 1234 - len(made))


async def fetch(node: Node, store: ProjectorStore) -> Path:
    try:
        entry = await trio.to_thread.run_sync(node.store.catalogue.get, "tiny")
    except ModelNotFound:
        entry = await node.transfer.find("tiny")
    _, part = await node.transfer.fetch_projector(entry, store.part_of, lambda done, total: None)
    return part


async def giving(world: World, node_id: str, data: bytes, announced: str = "") -> Node:
    node = await world.node(node_id, has_model=True)
    await trio.to_thread.run_sync(node.attach, data, "tiny", announced)
    await world.settle()
    return node


def lying(at: int) -> Twist:
    async def lie(request: FetchPiece, piece: Piece) -> Piece:
        if request.part == "projector" and request.offset == at:
            wrong = bytes((*piece.data[:-1], piece.data[-1] ^ 1))
            return msgspec.structs.replace(piece, data=memoryview(wrong))
        return piece

    return lie


async def test_it_comes_whole_from_several_and_their_bytes_count(tmp_path: Path, data: bytes) -> None:
    store = ProjectorStore(tmp_path / "projectors")
    async with open_world(tmp_path) as world:
        for node_id in (A, B):
            await giving(world, node_id, data)
        taker = await world.node(TAKER)
        part = await fetch(taker, store)
        assert await trio.Path(part).read_bytes() == data
        taken = await trio.to_thread.run_sync(store.take_in, part)
        assert store.owns(taken)
        assert await trio.Path(taken.path).read_bytes() == data
        assert taker.transfer.statistics().fetched_bytes >= len(data)
        given = [node.transfer.statistics().given_bytes for node in (world.nodes[A], world.nodes[B])]
        assert all(given), "each gave some"
        assert taker.trust.explain(A).counts == taker.trust.explain(B).counts == {"gave bytes": 1}


async def test_what_was_broken_off_goes_on_and_lies_of_then_are_found(tmp_path: Path, data: bytes) -> None:
    store = ProjectorStore(tmp_path / "projectors")
    async with open_world(tmp_path) as world:
        giver = await giving(world, A, data)

        async def stop(request: FetchPiece, piece: Piece) -> Piece:
            is_late = request.part == "projector" and request.offset >= 3 * PIECE_MAX
            return Piece(status="absent") if is_late else piece

        giver.twist = stop
        taker = await world.node(TAKER)
        with pytest.raises(NodeUnreachable, match="no node gave all of the projector"):
            await fetch(taker, store)
        (part,) = (tmp_path / "projectors").iterdir()
        assert part.read_bytes() == data[: 3 * PIECE_MAX]
        asked: list[int] = []

        async def note(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "projector":
                asked.append(request.offset)
            return piece

        giver.twist = note
        assert await trio.Path(await fetch(taker, store)).read_bytes() == data
        assert sorted(asked) == [3 * PIECE_MAX, 4 * PIECE_MAX]
        # What is left of an earlier time is wrong: all of it comes anew, and nobody is blamed.
        await trio.Path(part).write_bytes(b"x" * 2 * PIECE_MAX)
        assert await trio.Path(await fetch(taker, store)).read_bytes() == data
        assert taker.transfer.statistics().liars == []


async def test_one_liar_among_several_is_found_and_the_file_comes(tmp_path: Path, data: bytes) -> None:
    store = ProjectorStore(tmp_path / "projectors")
    async with open_world(tmp_path) as world:
        for node_id in (A, B):
            await giving(world, node_id, data)
        liar = min(A, B)
        taker = await world.node(TAKER)

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            wrong = memoryview(bytes(len(piece.data)))
            return msgspec.structs.replace(piece, data=wrong) if request.part == "projector" else piece

        world.nodes[liar].twist = lie
        assert await trio.Path(await fetch(taker, store)).read_bytes() == data
        assert taker.transfer.statistics().liars == [liar]
        assert taker.trust.explain(liar).counts == {"wrong bytes": 1}
        assert not taker.trust.may_work(liar)


@pytest.mark.parametrize("at", [0, (N_PIECES - 1) * PIECE_MAX])
async def test_a_single_giver_of_another_file_is_blamed_and_nothing_stays(
    tmp_path: Path, data: bytes, at: int
) -> None:
    store = ProjectorStore(tmp_path / "projectors")
    async with open_world(tmp_path) as world:
        (await giving(world, A, data)).twist = lying(at)
        taker = await world.node(TAKER)
        with pytest.raises(BadModel, match="is not the projector"):
            await fetch(taker, store)
        assert taker.transfer.statistics().liars == [A]
        (part,) = (tmp_path / "projectors").iterdir()
        assert part.stat().st_size == 0
        with pytest.raises(NodeUnreachable, match="no connected node gives a projector"):
            await fetch(taker, store)


async def test_a_node_that_does_not_share_or_has_changed_its_file_gives_nothing(
    tmp_path: Path, data: bytes
) -> None:
    store = ProjectorStore(tmp_path / "projectors")
    async with open_world(tmp_path) as world:
        giver = await giving(world, A, data)
        digest, model_id = giver.projectors[0].projector, giver.projectors[0].model_id
        request = FetchPiece(model_id=model_id, part="projector", size_bytes=8, projector=digest)
        assert (await giver.transfer.answer(request)).data == data[:8]
        behind = msgspec.structs.replace(request, offset=len(data))
        assert (await giver.transfer.answer(behind)) == Piece(status="ok", data=memoryview(b""))
        other = msgspec.structs.replace(request, projector=Digest("5e" * 32))
        assert (await giver.transfer.answer(other)).status == "absent"
        unsaid = FetchPiece(model_id=model_id, part="projector", size_bytes=8)
        assert (await giver.transfer.answer(unsaid)).status == "absent"
        giver.transfer.configure(replace(SETTINGS, share=False))
        assert (await giver.transfer.answer(request)).status == "absent"
        giver.transfer.configure(SETTINGS)
        await trio.Path(giver.home / "mmproj-0.gguf").write_bytes(data + b"more")
        assert (await giver.transfer.answer(request)).status == "absent"
        taker = await world.node(TAKER)
        with pytest.raises(NodeUnreachable):
            await fetch(taker, store)


async def test_a_huge_one_is_refused_before_a_byte_is_asked_for(tmp_path: Path, data: bytes) -> None:
    store = ProjectorStore(tmp_path / "projectors")
    async with open_world(tmp_path) as world:
        giver = await giving(world, A, data)
        taker = await world.node(TAKER, quota_bytes=10 * PIECE_MAX)
        huge = msgspec.structs.replace(giver.projectors[0], size_bytes=2**33)
        giver.projectors = (huge,)
        await world.settle()
        giver.n_asked = 0
        await taker.transfer.find("tiny")
        n_asked = giver.n_asked
        with pytest.raises(StoreFull):
            await fetch(taker, store)
        assert giver.n_asked == n_asked


def said(projector: str, size_bytes: int | None, n_embd: int = 64) -> ProjectorAnnounce:
    return ProjectorAnnounce(
        model_id=ModelId("ab" * 32),
        projector=Digest(projector * 32),
        n_embd=n_embd,
        **({} if size_bytes is None else {"size_bytes": size_bytes}),
    )


def test_what_most_give_is_fetched_and_what_does_not_fit_does_not_count() -> None:
    announced = {
        A: said("5e", 10),
        B: said("aa", 10),
        C: said("aa", 10),
        node_id_named("d"): said("11", None),
        node_id_named("e"): said("11", 10, n_embd=65),
        node_id_named("f"): said("11", 2**40),
        node_id_named("g"): said("11", 0),
    }
    given = most_given(announced, 64)
    assert given is not None
    assert (given.digest, given.size_bytes, given.holders) == ("aa" * 32, 10, tuple(sorted((B, C))))
    assert most_given({A: said("5e", 10), B: said("aa", 10)}, 64).digest == "5e" * 32  # type: ignore[union-attr]
    assert most_given({A: said("5e", None)}, 64) is None
