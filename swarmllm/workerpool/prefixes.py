"""KV that workers keep of prompts, by the names of its blocks: what there is, exported and imported."""

from __future__ import annotations

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.hosts import Hosts
from swarmllm.workerpool.settings import ModelFile
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.frames import Payload, as_pieces
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import (
    ExportPrefixSnapshot,
    ImportPrefixSnapshot,
    PrefixFetchProbe,
    PrefixFetchResult,
    PrefixManifestUpdate,
    PrefixSnapshotResponse,
)
from swarmllm_proto.ipc_kv import split_names
from swarmllm_proto.swarm_base import KeptPrefix


class KeptPrefixes:
    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._manifests: dict[ModelId, tuple[Worker, tuple[KeptPrefix, ...]]] = {}
        """By model id, what which worker said last."""

    def kept_prefixes(self) -> dict[ModelId, tuple[KeptPrefix, ...]]:
        """By model id, the beginnings of prompts of which workers that are up have the KV, the most recently
        used first; nothing where the settings do not want it told."""
        up = {model_id: said for model_id, said in self._manifests.items() if self._hosts.get(model_id)}
        self._manifests = up
        return {
            model_id: kept
            for model_id, (worker, kept) in self._manifests.items()
            if worker is self._hosts.worker(model_id)
        }

    def take_manifest(
        self, model_id: ModelId, worker: Worker, message: PrefixManifestUpdate, payload: memoryview
    ) -> None:
        """What a worker says it keeps. Raises BadMessage."""
        names = split_names(payload)
        if len(names) != len(message.n_blocks):
            raise BadMessage("n_blocks", f"{len(message.n_blocks)} numbers for {len(names)} names")
        self._manifests[model_id] = worker, tuple(map(KeptPrefix, names, message.n_blocks))

    async def name_prefix(
        self, model: ModelFile, *, request_id: str, layers: LayerRange, names: bytes, scope: str
    ) -> int:
        """Tell what the complete blocks of a request are called, for KV to be shared under these names (32
        bytes each) within `scope`. How many of them the request has rows of: one that has not begun gets
        those that are kept. Raises as `forward` does."""
        worker = await self._hosts.of(model).worker_for(request_id, 0)
        message = PrefixFetchProbe(
            id=worker.new_id(), request_id=request_id, start=layers.start, end=layers.end, scope=scope
        )
        result, _ = await worker.call(
            message, PrefixFetchResult, payload=names, timeout_s=self._hosts.settings.call_timeout_s
        )
        return result.n_blocks

    async def export_prefix(
        self, model: ModelFile, layers: LayerRange, names: bytes, scope: str = ""
    ) -> tuple[PrefixSnapshotResponse, memoryview]:
        """The KV that is kept of the first so many of these blocks, as bytes for `import_prefix`."""
        worker = await self._hosts.of(model).ready()
        message = ExportPrefixSnapshot(id=worker.new_id(), start=layers.start, end=layers.end, scope=scope)
        return await worker.call(
            message, PrefixSnapshotResponse, payload=names, timeout_s=self._hosts.settings.call_timeout_s
        )

    async def import_prefix(
        self,
        model: ModelFile,
        layers: LayerRange,
        names: bytes,
        snapshot: PrefixSnapshotResponse,
        data: Payload,
        scope: str = "",
    ) -> int:
        """Keep KV that another worker exported, of blocks with these names. How many blocks were taken: all,
        or 0 where there is no room. Raises WorkerError for bytes that are damaged or not of these layers."""
        worker = await self._hosts.of(model).ready()
        message = ImportPrefixSnapshot(
            id=worker.new_id(),
            start=layers.start,
            end=layers.end,
            scope=scope,
            n_blocks=snapshot.n_blocks,
            sizes=snapshot.sizes,
            digest=snapshot.digest,
        )
        result, _ = await worker.call(
            message,
            PrefixFetchResult,
            payload=[names, *as_pieces(data)],
            timeout_s=self._hosts.settings.call_timeout_s,
        )
        return result.n_blocks
