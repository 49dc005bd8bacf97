"""Nodes over the in-memory router as far as models transfer, each with a real catalogue and store."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
import trio.testing
from deadlines import DEADLINE_S
from gguf_parts import LLAMA, gguf_bytes
from msgspec import UNSET

from swarmllm.models import Catalogue, CatalogueEntry, LayerRange, Store
from swarmllm.models.projector import Projector, read_projector
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.transfer import ModelTransfer, TransferSettings
from swarmllm_proto.codec import decode_request, encode_record, encode_response
from swarmllm_proto.identifiers import Digest
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, NodeRecord, Piece, ProjectorAnnounce

SETTINGS = TransferSettings(piece_timeout_s=5.0, busy_pause_s=0.01, max_busy_pause_s=0.01, lanes_per_holder=2)
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
    """One node as far as models transfer."""

    def __init__(
        self,
        network: InMemoryNetwork,
        folder: Path,
        node_id: str,
        settings: TransferSettings = SETTINGS,
        quota_bytes: int = 0,
    ) -> None:
        home = folder / node_id
        home.mkdir(exist_ok=True)
        self.home = home
        self.router: InMemoryRouter = network.add(node_id)
        self.trust = Trust()
        self.registry = Registry(node_id, self.trust)
        self.store = Store(Catalogue(home / "catalogue.sqlite"), home / "models", quota_bytes)
        self.loaded: set[str] = set()
        self.transfer = ModelTransfer(
            self.router,
            self.registry,
            self.store,
            settings,
            in_use=lambda: self.loaded,
            on_change=lambda: None,
            note=self.trust.note,
        )
        self.projectors: tuple[ProjectorAnnounce, ...] = ()
        self.twist: Twist | None = None
        self.n_asked = 0
        self.asked = trio.Event()

    async def on_request(self, sender: str, body: bytes) -> bytes:
        request = decode_request(body)
        assert isinstance(request, FetchPiece)
        self.n_asked += 1
        self.asked.set()
        piece = await self.transfer.answer(request)
        if self.twist is not None:
            piece = await self.twist(request, piece)
        return encode_response(piece)

    def add(self, data: bytes = MODEL, name: str = "tiny") -> CatalogueEntry:
        path = self.home / f"{name}.gguf"
        path.write_bytes(data)
        return self.store.catalogue.add(path, name)

    async def announce(self) -> None:
        files = self.transfer.announcements(self.store.catalogue.list())
        record = NodeRecord(node_id=self.router.node_id, files=files, projectors=self.projectors or UNSET)
        await self.router.publish(encode_record(record))

    def attach(self, data: bytes, model: str = "tiny", announced: str = "") -> Projector:
        """Let a model have a projector of these bytes; `announced`: as if they had this BLAKE3."""
        path = self.home / f"mmproj-{len(self.projectors)}.gguf"
        path.write_bytes(data)
        read = read_projector(path)
        projector = msgspec.structs.replace(read, blake3=announced or read.blake3)
        entry = self.store.catalogue.attach(self.store.catalogue.get(model).model_id, projector)
        self.projectors += (
            ProjectorAnnounce(
                model_id=entry.model_id,
                projector=Digest(projector.blake3),
                n_embd=projector.n_embd,
                size_bytes=projector.size_bytes,
            ),
        )
        return projector

    async def get(self, layers: LayerRange | None = WHOLE, name: str = "tiny", **how: Any) -> CatalogueEntry:
        entry = await self.transfer.find(name)
        return await self.transfer.ensure(entry, layers, how.pop("progress", lambda done, total: None), **how)


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
    with trio.fail_after(DEADLINE_S):
        async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
            yield World(network, nursery, folder)
            nursery.cancel_scope.cancel()
