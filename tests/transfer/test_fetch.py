"""Who gives, who is slow, who disappears: what arrives, from whom, and what is kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
import trio.testing
from node_ids import A, B, C, node_id_named

from swarmllm.errors import (
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    StoreFull,
)
from swarmllm.models import LayerRange, needed_tensors
from swarmllm.transfer import TransferSettings
from swarmllm_proto.swarm import FetchPiece, Piece

from .transfer_nodes import (
    CHUNK_LIST_BYTES,
    MODEL,
    TENSOR_BYTES,
    WHOLE,
    model_bytes,
    open_world,
)

TAKER = node_id_named("taker")


async def test_several_holders_give_one_model_and_nothing_twice(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        givers = [await world.node(node_id, has_model=True) for node_id in (A, B, C)]
        taker = await world.node(TAKER)
        seen: list[tuple[int, int]] = []
        entry = await taker.get(progress=lambda done, total: seen.append((done, total)))
        assert entry.path.read_bytes() == MODEL
        assert taker.store.verify(entry, lambda done, total: None) == ()
        assert seen[-1] == (10 * TENSOR_BYTES, 10 * TENSOR_BYTES)
        assert all(giver.n_asked > 3 for giver in givers)
        given = sum(giver.transfer.statistics().given_bytes for giver in givers)
        assert given == taker.transfer.statistics().fetched_bytes < len(MODEL) + 4096


async def test_only_what_the_layers_need_is_fetched(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node(A, has_model=True)
        taker = await world.node(TAKER)
        entry = await taker.get(LayerRange(0, 1))
        assert entry.present == {t.name for t in needed_tensors(entry.manifest, LayerRange(0, 1))}
        before = taker.transfer.statistics().fetched_bytes
        entry = await taker.transfer.ensure(entry, LayerRange(0, 1), lambda done, total: None, origin=True)
        assert taker.transfer.statistics().fetched_bytes == before
        await taker.transfer.ensure(entry, LayerRange(1, 2), lambda done, total: None)
        assert taker.transfer.statistics().fetched_bytes < len(MODEL) + 4096


async def test_who_has_a_part_gives_that_part(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node(A, has_model=True)
        middle = await world.node(B)
        await middle.get(LayerRange(0, 1))
        last = await world.node(C)
        await last.get(LayerRange(1, 2))
        world.network.kill(A)
        taker = await world.node(TAKER)
        entry = await taker.get()
        assert entry.path.read_bytes() == MODEL


async def test_nobody_honest_is_left_and_what_arrived_is_kept(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        giver = await world.node(A, has_model=True)

        async def only_the_first_layer(request: FetchPiece, piece: Piece) -> Piece:
            return Piece(status="absent") if request.tensor.startswith("blk.1.") else piece

        giver.twist = only_the_first_layer
        taker = await world.node(TAKER)
        with pytest.raises(NodeUnreachable, match=r"blk\.1\.") as caught:
            await taker.get()
        assert caught.value.http_status == 503
        before = taker.transfer.statistics().fetched_bytes
        giver.twist = None
        assert (await taker.get()).path.read_bytes() == MODEL
        assert taker.transfer.statistics().fetched_bytes - before == 3 * (TENSOR_BYTES + CHUNK_LIST_BYTES)


async def test_a_holder_that_disappears_is_replaced_by_another(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        leaving = await world.node(A, has_model=True)
        await world.node(B, has_model=True)
        n_pieces = 0

        async def leave(request: FetchPiece, piece: Piece) -> Piece:
            nonlocal n_pieces
            n_pieces += request.part == "tensor"
            if n_pieces == 3:
                world.network.kill(A)
            return piece

        leaving.twist = leave
        taker = await world.node(TAKER)
        assert (await taker.get()).path.read_bytes() == MODEL
        assert taker.transfer.statistics().liars == []


async def test_a_holder_that_never_answers_does_not_hold_up_the_others(tmp_path: Path) -> None:
    hasty = TransferSettings(piece_timeout_s=2.0, lanes_per_holder=2, max_failures=1)
    async with open_world(tmp_path) as world:
        silent = await world.node(A, has_model=True)

        async def never(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor":
                await trio.sleep_forever()
            return piece

        silent.twist = never
        await world.node(B, has_model=True)
        taker = await world.node(TAKER, settings=hasty)
        assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_busy_holder_is_asked_again(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        busy = await world.node(A, has_model=True)
        dice = random.Random(2)

        async def refuse(request: FetchPiece, piece: Piece) -> Piece:
            return Piece(status="busy") if dice.random() < 0.5 else piece

        busy.twist = refuse
        taker = await world.node(TAKER)
        assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_cancelled_fetch_keeps_what_it_has(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node(A, has_model=True)
        taker = await world.node(TAKER)
        entry = await taker.transfer.find("tiny")
        with trio.CancelScope() as scope:

            def stop_half_way(done: int, total: int) -> None:
                if done > total // 2:
                    scope.cancel()

            await taker.transfer.ensure(entry, WHOLE, stop_half_way)
        assert scope.cancelled_caught
        before = taker.transfer.statistics().fetched_bytes
        assert (await taker.get()).path.read_bytes() == MODEL
        assert taker.transfer.statistics().fetched_bytes - before < len(MODEL) * 3 // 4


async def test_two_that_want_the_same_fetch_it_once(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node(A, has_model=True)
        taker = await world.node(TAKER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(taker.get)
            nursery.start_soon(taker.get)
        assert taker.transfer.statistics().fetched_bytes < len(MODEL) + 4096


async def test_room_is_made_only_of_what_others_have_and_nobody_uses(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        giver = await world.node(A, has_model=True)
        giver.add(model_bytes(2), "other")
        taker = await world.node(TAKER, quota_bytes=len(MODEL) + TENSOR_BYTES)
        await world.settle()
        first = await taker.get()
        taker.loaded = {first.model_id}
        with pytest.raises(StoreFull):
            await taker.get(name="other")
        assert taker.store.catalogue.get("tiny").path.read_bytes() == MODEL
        taker.loaded = set()
        giver.store.remove(giver.store.catalogue.get("tiny"))
        await world.settle()
        with pytest.raises(StoreFull):
            await taker.get(name="other")
        assert first.path.exists(), "the last copy stays"
        giver.add()
        await world.settle()
        await taker.get(name="other")
        assert not first.path.exists()


async def test_a_name_that_means_two_models_must_be_told_by_id(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        entry = (await world.node(A, has_model=True)).store.catalogue.get("tiny")
        other = await world.node(B)
        other.add(model_bytes(3))
        await world.settle()
        taker = await world.node(TAKER)
        with pytest.raises(InvalidRequest, match=entry.model_id[:12]):
            await taker.transfer.find("tiny")
        assert (await taker.transfer.find(entry.model_id[:12])).model_id == entry.model_id
        with pytest.raises(ModelNotFound):
            await taker.transfer.find("nothing")


async def test_who_does_not_share_announces_and_gives_nothing(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        private = await world.node(A, has_model=True, settings=TransferSettings(share=False))
        taker = await world.node(TAKER)
        with pytest.raises(ModelNotFound):
            await taker.transfer.find("tiny")
        model_id = private.store.catalogue.get("tiny").model_id
        request = FetchPiece(model_id=model_id, part="header", size_bytes=1)
        assert (await private.transfer.answer(request)).status == "absent"
