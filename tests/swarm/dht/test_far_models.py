"""A model that no connected node has is found through the DHT by its name or its id, and fetched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from gguf_parts import LLAMA, gguf_bytes

from swarmllm.errors import ModelNotFound
from swarmllm.models import Catalogue, Store
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.network_key import NetworkFile, new_secret, private_network
from swarmllm.swarm.records.envelope_book import EnvelopeBook
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.router import DhtMode
from swarmllm.swarm.settings import SwarmSettings
from swarmllm.transfer import ModelTransfer, TransferSettings
from swarmllm_proto.codec import decode_request, encode_record, encode_response
from swarmllm_proto.swarm import FetchPiece, NodeRecord

from ..conftest import DEADLINE_S, until

pytestmark = pytest.mark.slow

NAMES = ["token_embd.weight", "output_norm.weight", "output.weight"]
NAMES += [f"blk.{layer}.attn_q.weight" for layer in (0, 1)]


class Node:
    def __init__(self, router: Libp2pRouter, folder: Path) -> None:
        self.router = router
        self.registry = Registry(router.node_id)
        self.folder = folder
        self.store = Store(Catalogue(folder / "catalogue.sqlite"), folder / "models")
        self.transfer = ModelTransfer(
            router,
            self.registry,
            self.store,
            TransferSettings(),
            in_use=list,
            on_change=lambda: None,
            seeker=router.wide_area,
        )
        router.serve(self.answer, _no_messages)

    async def answer(self, sender: str, body: bytes) -> bytes:
        request = decode_request(body)
        assert isinstance(request, FetchPiece)
        return encode_response(await self.transfer.answer(request))

    async def has(self, name: str) -> str:
        path = self.folder / f"{name}.gguf"
        path.write_bytes(gguf_bytes({**LLAMA, "general.name": name}, {n: bytes(4096) for n in NAMES}))
        entry = self.store.catalogue.add(path, name)
        files = self.transfer.announcements(self.store.catalogue.list())
        await self.router.publish(encode_record(NodeRecord(node_id=self.router.node_id, files=files)))
        self.transfer.announce_far((each.model_id, each.name) for each in files)
        return entry.model_id


async def _no_messages(sender: str, header: bytes, payload: memoryview) -> None:
    raise AssertionError("models travel by requests")


@asynccontextmanager
async def node(
    folder: Path, name: str, *bootstrap: str, dht: DhtMode = "client", secret: bytes | None = None
) -> AsyncIterator[Node]:
    home = folder / name
    home.mkdir()
    if secret is not None:
        NetworkFile(home).change(lambda _: private_network(secret))
    settings = SwarmSettings(home, "127.0.0.1", 0, 0, bootstrap=bootstrap, max_peers=1, mdns=False, dht=dht)
    async with open_libp2p_router(settings) as router, trio.open_nursery() as nursery:
        made = Node(router, home)
        await nursery.start(follow_router, made.registry, router)
        yield made
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_private", [False, True], ids=["open", "private"])
async def test_it_is_found_fetched_and_its_holder_connected(
    tmp_path: Path, is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A swarm larger than what one node connects with and keeps records of, in small; clients are not dialled
    # by lookups either.
    monkeypatch.setattr(EnvelopeBook, "heard_at_s", lambda book, node_id: None)
    secret = new_secret() if is_private else None
    async with (
        node(tmp_path, "middle", dht="on", secret=secret) as middle,
        node(tmp_path, "holder", middle.router.addresses[0], secret=secret) as holder,
    ):
        model_id = await holder.has("rare")
        await holder.has("another")
        with trio.fail_after(DEADLINE_S):
            while len(middle.router.wide_area.dht.core.providers) < 4:  # noqa: ASYNC110 (no event tells)
                await trio.sleep(0.05)
        async with node(tmp_path, "seeker", middle.router.addresses[0], secret=secret) as seeker:
            await until(seeker.router, lambda: middle.router.node_id in seeker.router.connected())
            with trio.fail_after(DEADLINE_S):
                while not len(seeker.router.wide_area.dht.core.table):  # noqa: ASYNC110 (no event tells)
                    await trio.sleep(0.05)
                assert seeker.router.connected() == {middle.router.node_id}
                with pytest.raises(ModelNotFound):
                    await seeker.transfer.find("rare")
                with pytest.raises(ModelNotFound):
                    await seeker.transfer.find("nobody has it", far=True)
                entry = await seeker.transfer.find("rare", far=True)
                assert entry.model_id == model_id
                assert holder.router.node_id in seeker.router.connected()
                entry = await seeker.transfer.ensure(entry, entry.manifest.whole, lambda done, total: None)
                assert not entry.absent(entry.manifest.tensors)
