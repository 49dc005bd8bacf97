"""Several nodes over the in-memory router, each with a real catalogue and store: who gives, lies, is slow or
disappears."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from gguf_parts import LLAMA, gguf_bytes

from swarmllm.errors import (
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    RemoteError,
    StoreFull,
)
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange, Store, needed_tensors
from swarmllm.swarm.memory import InMemoryNetwork
from swarmllm.swarm.memory_router import InMemoryRouter
from swarmllm.swarm.registry import Registry
from swarmllm.swarm.registry_feed import follow_router
from swarmllm.swarm.trust_keeper import Trust
from swarmllm.travel import Travel, TravelSettings
from swarmllm_proto.codec import decode_request, encode_record, encode_response
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, NodeRecord, Piece

SETTINGS = TravelSettings(piece_timeout_s=5.0, busy_pause_s=0.01, max_busy_pause_s=0.01, lanes_per_holder=2)
TENSOR_BYTES = PIECE_MAX + 4096
CHUNK_LIST_BYTES = 2 * 32
WHOLE = LayerRange(0, 2)

Twist = Callable[[FetchPiece, Piece], Awaitable[Piece]]


def model_bytes(seed: int = 1) -> bytes:
    dice = random.Random(seed)
    names = ["token_embd.weight", "rope_freqs.weight", "output_norm.weight", "output.weight"]
    names += [f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in ("attn_q", "ffn_up", "ffn_down")]
    return gguf_bytes(
        {**LLAMA, "general.name": f"seed {seed}"}, {n: dice.randbytes(TENSOR_BYTES) for n in names}
    )


MODEL = model_bytes()


class Node:
    """One node as far as models travel."""

    def __init__(
        self,
        network: InMemoryNetwork,
        folder: Path,
        node_id: str,
        settings: TravelSettings = SETTINGS,
        quota_bytes: int = 0,
    ) -> None:
        home = folder / node_id
        home.mkdir(exist_ok=True)
        self.home = home
        self.router: InMemoryRouter = network.add(node_id)
        self.trust = Trust()
        self.registry = Registry(node_id, self.trust.may_work)
        self.store = Store(Catalogue(home / "catalogue.sqlite"), home / "models", quota_bytes)
        self.loaded: set[str] = set()
        self.travel = Travel(
            self.router,
            self.registry,
            self.store,
            settings,
            in_use=lambda: self.loaded,
            on_change=lambda: None,
            note=self.trust.note,
        )
        self.twist: Twist | None = None
        self.n_asked = 0
        self.asked = trio.Event()

    async def on_request(self, sender: str, body: bytes) -> bytes:
        request = decode_request(body)
        assert isinstance(request, FetchPiece)
        self.n_asked += 1
        self.asked.set()
        piece = await self.travel.answer(request)
        if self.twist is not None:
            piece = await self.twist(request, piece)
        return encode_response(piece)

    def add(self, data: bytes = MODEL, name: str = "tiny") -> CatalogueEntry:
        path = self.home / f"{name}.gguf"
        path.write_bytes(data)
        return self.store.catalogue.add(path, name)

    async def announce(self) -> None:
        files = self.travel.announcements(self.store.catalogue.list())
        await self.router.publish(encode_record(NodeRecord(node_id=self.router.node_id, files=files)))

    async def get(self, layers: LayerRange | None = WHOLE, name: str = "tiny", **how: Any) -> CatalogueEntry:
        entry = await self.travel.find(name)
        return await self.travel.ensure(entry, layers, how.pop("progress", lambda done, total: None), **how)


class World:
    def __init__(self, network: InMemoryNetwork, nursery: trio.Nursery, folder: Path) -> None:
        self.network = network
        self._nursery = nursery
        self._folder = folder
        self.nodes: dict[str, Node] = {}

    async def node(self, node_id: str, *, has_model: bool = False, **how: Any) -> Node:
        node = self.nodes[node_id] = Node(self.network, self._folder, node_id, **how)
        await self._nursery.start(follow_router, node.registry, node.router)
        node.router.serve(node.on_request, _no_messages)
        if has_model:
            node.add()
        await self.settle()
        return node

    async def settle(self) -> None:
        """Everybody has heard everybody."""
        for node in self.nodes.values():
            await node.announce()
        await trio.testing.wait_all_tasks_blocked()


async def _no_messages(sender: str, header: bytes, payload: memoryview) -> None:
    raise AssertionError("models travel by requests")


@asynccontextmanager
async def open_world(folder: Path) -> AsyncIterator[World]:
    with trio.fail_after(30):
        async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
            yield World(network, nursery, folder)
            nursery.cancel_scope.cancel()


async def test_several_holders_give_one_model_and_nothing_twice(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        givers = [await world.node(node_id, has_model=True) for node_id in ("a", "b", "c")]
        taker = await world.node("taker")
        seen: list[tuple[int, int]] = []
        entry = await taker.get(progress=lambda done, total: seen.append((done, total)))
        assert entry.path.read_bytes() == MODEL
        assert taker.store.verify(entry, lambda done, total: None) == ()
        assert seen[-1] == (10 * TENSOR_BYTES, 10 * TENSOR_BYTES)
        assert all(giver.n_asked > 3 for giver in givers)
        given = sum(giver.travel.statistics().given_bytes for giver in givers)
        assert given == taker.travel.statistics().fetched_bytes < len(MODEL) + 4096


async def test_only_what_the_layers_need_is_fetched(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node("a", has_model=True)
        taker = await world.node("taker")
        entry = await taker.get(LayerRange(0, 1))
        assert entry.present == {t.name for t in needed_tensors(entry.manifest, LayerRange(0, 1))}
        before = taker.travel.statistics().fetched_bytes
        entry = await taker.travel.ensure(entry, LayerRange(0, 1), lambda done, total: None, origin=True)
        assert taker.travel.statistics().fetched_bytes == before
        await taker.travel.ensure(entry, LayerRange(1, 2), lambda done, total: None)
        assert taker.travel.statistics().fetched_bytes < len(MODEL) + 4096


async def test_who_has_a_part_gives_that_part(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node("a", has_model=True)
        middle = await world.node("b")
        await middle.get(LayerRange(0, 1))
        last = await world.node("c")
        await last.get(LayerRange(1, 2))
        world.network.kill("a")
        taker = await world.node("taker")
        entry = await taker.get()
        assert entry.path.read_bytes() == MODEL


async def test_a_liar_is_found_out_and_the_others_give_what_it_lied_about(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        liar = await world.node("a", has_model=True)
        await world.node("b", has_model=True)

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor":
                wrong = bytes((*piece.data[:-1], piece.data[-1] ^ 1))
                return msgspec.structs.replace(piece, data=memoryview(wrong))
            return piece

        liar.twist = lie
        taker = await world.node("taker")
        entry = await taker.get()
        assert taker.store.verify(entry, lambda done, total: None) == ()
        assert entry.path.read_bytes() == MODEL
        assert taker.travel.statistics().liars == ["a"]
        assert taker.trust.explain("a").counts == {"wrong bytes": 1}
        assert taker.trust.explain("b").counts == {"gave bytes": 10}
        assert not taker.trust.may_work("a")
        assert taker.travel.sources(entry.model_id) == ("b",)


@pytest.mark.parametrize("part", ["outline", "header"])
async def test_a_lie_about_the_model_itself_is_found_before_any_tensor(tmp_path: Path, part: str) -> None:
    async with open_world(tmp_path) as world:
        liar = await world.node("a", has_model=True)

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            at = len(piece.data) // 2
            wrong = bytes((*piece.data[:at], piece.data[at] ^ 1, *piece.data[at + 1 :]))
            return msgspec.structs.replace(piece, data=memoryview(wrong)) if request.part == part else piece

        liar.twist = lie
        taker = await world.node("taker")
        with pytest.raises(RemoteError):
            await taker.get()
        assert taker.travel.statistics().liars == ["a"]
        assert taker.store.catalogue.list() == ()
        await world.node("b", has_model=True)
        assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_wrong_chunk_is_never_written_and_its_sender_known(tmp_path: Path) -> None:
    """The liar gives a right first MiB and a wrong rest: the other one goes on after the first."""
    async with open_world(tmp_path) as world:
        liar = await world.node("a", has_model=True)
        taker = await world.node("taker")

        async def lie_later(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor" and request.offset:
                return msgspec.structs.replace(piece, data=memoryview(bytes(len(piece.data))))
            return piece

        liar.twist = lie_later
        with pytest.raises(NodeUnreachable, match="wrong bytes of"):
            await taker.get()
        (entry,) = taker.store.catalogue.list()
        there = entry.path.read_bytes()
        tensors = [tensor for shard in entry.manifest.shards for tensor in shard.tensors]
        for tensor in tensors:
            second = tensor.offset + PIECE_MAX
            assert there[second : tensor.offset + tensor.size_bytes] == bytes(4096), "a hole still"
        before = taker.travel.statistics().fetched_bytes
        assert before
        await world.node("b", has_model=True)
        assert (await taker.get()).path.read_bytes() == MODEL
        first = sum(there[t.offset : t.offset + PIECE_MAX] != bytes(PIECE_MAX) for t in tensors)
        assert first
        anew = taker.travel.statistics().fetched_bytes - before
        assert anew <= len(tensors) * (TENSOR_BYTES + CHUNK_LIST_BYTES) - first * PIECE_MAX


async def test_a_lie_about_a_chunk_list_is_found_before_any_chunk(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        liar = await world.node("a", has_model=True)
        taker = await world.node("taker")

        async def lie(request: FetchPiece, piece: Piece) -> Piece:
            return msgspec.structs.replace(piece, data=memoryview(b"")) if request.part == "chunks" else piece

        liar.twist = lie
        with pytest.raises(NodeUnreachable, match="wrong chunk list"):
            await taker.get()
        assert taker.travel.statistics().liars == ["a"]


async def test_nobody_honest_is_left_and_what_arrived_is_kept(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        giver = await world.node("a", has_model=True)

        async def only_the_first_layer(request: FetchPiece, piece: Piece) -> Piece:
            return Piece(status="absent") if request.tensor.startswith("blk.1.") else piece

        giver.twist = only_the_first_layer
        taker = await world.node("taker")
        with pytest.raises(NodeUnreachable, match=r"blk\.1\.") as caught:
            await taker.get()
        assert caught.value.http_status == 503
        before = taker.travel.statistics().fetched_bytes
        giver.twist = None
        assert (await taker.get()).path.read_bytes() == MODEL
        assert taker.travel.statistics().fetched_bytes - before == 3 * (TENSOR_BYTES + CHUNK_LIST_BYTES)


async def test_a_holder_that_disappears_is_replaced_by_another(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        leaving = await world.node("a", has_model=True)
        await world.node("b", has_model=True)
        n_pieces = 0

        async def leave(request: FetchPiece, piece: Piece) -> Piece:
            nonlocal n_pieces
            n_pieces += request.part == "tensor"
            if n_pieces == 3:
                world.network.kill("a")
            return piece

        leaving.twist = leave
        taker = await world.node("taker")
        assert (await taker.get()).path.read_bytes() == MODEL
        assert taker.travel.statistics().liars == []


async def test_a_holder_that_never_answers_does_not_hold_up_the_others(tmp_path: Path) -> None:
    hasty = TravelSettings(piece_timeout_s=0.1, lanes_per_holder=2, max_failures=1)
    async with open_world(tmp_path) as world:
        silent = await world.node("a", has_model=True)

        async def never(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor":
                await trio.sleep_forever()
            return piece

        silent.twist = never
        await world.node("b", has_model=True)
        taker = await world.node("taker", settings=hasty)
        assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_busy_holder_is_asked_again(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        busy = await world.node("a", has_model=True)
        dice = random.Random(2)

        async def refuse(request: FetchPiece, piece: Piece) -> Piece:
            return Piece(status="busy") if dice.random() < 0.5 else piece

        busy.twist = refuse
        taker = await world.node("taker")
        assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_cancelled_fetch_keeps_what_it_has(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node("a", has_model=True)
        taker = await world.node("taker")
        entry = await taker.travel.find("tiny")
        with trio.CancelScope() as scope:

            def stop_half_way(done: int, total: int) -> None:
                if done > total // 2:
                    scope.cancel()

            await taker.travel.ensure(entry, WHOLE, stop_half_way)
        assert scope.cancelled_caught
        before = taker.travel.statistics().fetched_bytes
        assert (await taker.get()).path.read_bytes() == MODEL
        assert taker.travel.statistics().fetched_bytes - before < len(MODEL) * 3 // 4


async def test_two_that_want_the_same_fetch_it_once(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        await world.node("a", has_model=True)
        taker = await world.node("taker")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(taker.get)
            nursery.start_soon(taker.get)
        assert taker.travel.statistics().fetched_bytes < len(MODEL) + 4096


async def test_room_is_made_only_of_what_others_have_and_nobody_uses(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        giver = await world.node("a", has_model=True)
        giver.add(model_bytes(2), "other")
        taker = await world.node("taker", quota_bytes=len(MODEL) + TENSOR_BYTES)
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
        entry = (await world.node("a", has_model=True)).store.catalogue.get("tiny")
        other = await world.node("b")
        other.add(model_bytes(3))
        await world.settle()
        taker = await world.node("taker")
        with pytest.raises(InvalidRequest, match=entry.model_id[:12]):
            await taker.travel.find("tiny")
        assert (await taker.travel.find(entry.model_id[:12])).model_id == entry.model_id
        with pytest.raises(ModelNotFound):
            await taker.travel.find("nothing")


async def test_who_does_not_share_announces_and_gives_nothing(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        private = await world.node("a", has_model=True, settings=TravelSettings(share=False))
        taker = await world.node("taker")
        with pytest.raises(ModelNotFound):
            await taker.travel.find("tiny")
        model_id = private.store.catalogue.get("tiny").model_id
        request = FetchPiece(model_id=model_id, part="header", size_bytes=1)
        assert (await private.travel.answer(request)).status == "absent"
