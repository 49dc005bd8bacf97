"""Holders that give wrong bytes: found out before anything is written, and not asked again."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from node_ids import A, B, node_id_named

from swarmllm.errors import (
    NodeUnreachable,
    RemoteError,
)
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, Piece

from .transfer_nodes import (
    CHUNK_LIST_BYTES,
    MODEL,
    TENSOR_BYTES,
    open_world,
)

TAKER = node_id_named("taker")


async def test_a_liar_is_found_out_and_the_others_give_what_it_lied_about(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        liar = await world.node(A, has_model=True)
        await world.node(B, has_model=True)

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor":
                wrong = bytes((*piece.data[:-1], piece.data[-1] ^ 1))
                return msgspec.structs.replace(piece, data=memoryview(wrong))
            return piece

        liar.twist = lie
        taker = await world.node(TAKER)
        entry = await taker.get()
        assert taker.store.verify(entry, lambda done, total: None) == ()
        assert entry.path.read_bytes() == MODEL
        assert taker.transfer.statistics().liars == [A]
        assert taker.trust.explain(A).counts == {"wrong bytes": 1}
        assert taker.trust.explain(B).counts == {"gave bytes": 10}
        assert not taker.trust.may_work(A)
        assert taker.transfer.sources(entry.model_id) == (B,)


@pytest.mark.parametrize("part", ["outline", "header"])
async def test_a_lie_about_the_model_itself_is_found_before_any_tensor(tmp_path: Path, part: str) -> None:
    async with open_world(tmp_path) as world:
        liar = await world.node(A, has_model=True)

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            at = len(piece.data) // 2
            wrong = bytes((*piece.data[:at], piece.data[at] ^ 1, *piece.data[at + 1 :]))
            return msgspec.structs.replace(piece, data=memoryview(wrong)) if request.part == part else piece

        liar.twist = lie
        taker = await world.node(TAKER)
        with pytest.raises(RemoteError):
            await taker.get()
        assert taker.transfer.statistics().liars == [A]
        assert taker.store.catalogue.list() == ()
        await world.node(B, has_model=True)
        assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_wrong_chunk_is_never_written_and_its_sender_known(tmp_path: Path) -> None:
    """The liar gives a right first MiB and a wrong rest: the other one goes on after the first."""
    async with open_world(tmp_path) as world:
        liar = await world.node(A, has_model=True)
        taker = await world.node(TAKER)

        async def lie_later(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor" and request.offset:
                return msgspec.structs.replace(piece, data=memoryview(bytes(len(piece.data))))
            return piece

        liar.twist = lie_later
        with pytest.raises(NodeUnreachable, match="wrong bytes of"):
            await taker.get()
        (entry,) = taker.store.catalogue.list()
        there = entry.path.read_bytes()
        tensors = entry.manifest.tensors
        for tensor in tensors:
            second = tensor.offset + PIECE_MAX
            assert there[second : tensor.offset + tensor.size_bytes] == bytes(4096), "a hole still"
        before = taker.transfer.statistics().fetched_bytes
        assert before
        await world.node(B, has_model=True)
        assert (await taker.get()).path.read_bytes() == MODEL
        first = sum(there[t.offset : t.offset + PIECE_MAX] != bytes(PIECE_MAX) for t in tensors)
        assert first
        anew = taker.transfer.statistics().fetched_bytes - before
        assert anew <= len(tensors) * (TENSOR_BYTES + CHUNK_LIST_BYTES) - first * PIECE_MAX


async def test_a_lie_about_a_chunk_list_is_found_before_any_chunk(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        liar = await world.node(A, has_model=True)
        taker = await world.node(TAKER)

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            return msgspec.structs.replace(piece, data=memoryview(b"")) if request.part == "chunks" else piece

        liar.twist = lie
        with pytest.raises(NodeUnreachable, match="wrong chunk list"):
            await taker.get()
        assert taker.transfer.statistics().liars == [A]
