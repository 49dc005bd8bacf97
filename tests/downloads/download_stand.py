"""Nodes' downloads on a simulated swarm, with what they fetch into: real catalogues, stores and files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trio
from deadlines import DEADLINE_S

from swarmllm.downloads import Download, DownloadRequest, Downloads, DownloadSettings, SharedDigests
from swarmllm.guide import DRAFT_PATH, GUIDE_PATH
from swarmllm.models import Catalogue, CatalogueEntry, Manifest, Store, build_manifest
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Registry
from swarmllm.transfer import ModelTransfer, TransferSettings
from swarmllm_proto.codec import decode_request, encode_response
from swarmllm_proto.file_digests import FetchDigests

PIECE_BYTES = 64 * 1024
MODEL = "/models/tiny-q8_0.gguf"
DATA = DRAFT_PATH.read_bytes()
GUIDE = "/models/guide-q8_0.gguf"
GUIDE_DATA = GUIDE_PATH.read_bytes()
SETTINGS = DownloadSettings(
    piece_bytes=PIECE_BYTES, header_step_bytes=PIECE_BYTES, first_pause_s=0.001, max_pause_s=0.01
)


@cache
def tiny() -> Manifest:
    return build_manifest(DRAFT_PATH)


@cache
def guide() -> Manifest:
    return build_manifest(GUIDE_PATH)


@dataclass
class Stand:
    node_id: str
    downloads: Downloads
    gathering: SharedDigests
    store: Store
    catalogue: Catalogue
    folder: Path

    async def fetch(self, source: str, **options: Any) -> Download:
        download = self.downloads.start(DownloadRequest(source, **options))
        with trio.fail_after(DEADLINE_S):
            await download.ended.wait()
        return download

    @property
    def parts(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("downloads/*/*") if path.is_file())


@dataclass
class CatalogueModels:
    """Only this node's, whose cuts nobody tries."""

    catalogue: Catalogue

    async def find(self, name_or_id: str) -> CatalogueEntry:
        return await trio.to_thread.run_sync(self.catalogue.resolve, name_or_id)

    async def try_cuts(self, entry: CatalogueEntry) -> CatalogueEntry:
        return entry


@asynccontextmanager
async def open_stand(
    folder: Path,
    settings: DownloadSettings = SETTINGS,
    network: InMemoryNetwork | None = None,
    node_id: str = "node-a",
    believes: tuple[str, ...] | None = None,
    reask_s: float = 60.0,
    quota_bytes: int = 0,
) -> AsyncIterator[Stand]:
    """`believes`: None: everybody. Leaving the block is the end of the node."""
    if network is None:
        async with (
            InMemoryNetwork() as alone,
            open_stand(folder, settings, alone, node_id, quota_bytes=quota_bytes) as stand,
        ):
            yield stand
        return
    catalogue = Catalogue(folder / "catalogue.sqlite")
    store = Store(catalogue, folder / "models", quota_bytes, folder / "downloads")
    store.sweep()

    async def on_request(sender: str, body: bytes) -> bytes:
        question = decode_request(body)
        assert isinstance(question, FetchDigests)
        return encode_response(await gathering.answer(sender, question))

    async def on_message(sender: str, header: bytes, payload: memoryview) -> None:
        raise AssertionError("downloads send no messages")

    router = network.add(node_id)
    transfer = ModelTransfer(
        router, Registry(node_id), store, TransferSettings(), in_use=lambda: (), on_change=lambda: None
    )
    gathering = SharedDigests(
        folder / "downloads",
        router,
        transfer,
        may_believe=lambda other: believes is None or other in believes,
        reask_s=reask_s,
    )
    downloads = Downloads(
        folder / "downloads", transfer, settings, gathering=gathering, models=CatalogueModels(catalogue)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(gathering.run)
        router.serve(on_request, on_message)
        await nursery.start(downloads.run)
        try:
            yield Stand(node_id, downloads, gathering, store, catalogue, folder)
        finally:
            network.kill(node_id)
            nursery.cancel_scope.cancel()
