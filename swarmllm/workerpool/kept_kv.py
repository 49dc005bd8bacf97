"""KV that outlives its request: kept prefixes of prompts, and KV of requests whose pipeline broke."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import trio
from msgspec import UNSET

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.forward_result import Hidden, checked_tensor
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.settings import ModelFile
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.frames import Payload, as_pieces
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import (
    CheckPrefix,
    Done,
    ExportPrefixSnapshot,
    HoldRequest,
    ImportPrefixSnapshot,
    KeptRows,
    LayerResult,
    LookUpPrefix,
    PrefixChecked,
    PrefixFetchProbe,
    PrefixFetchResult,
    PrefixLookedUp,
    PrefixManifestUpdate,
    PrefixSnapshotResponse,
    ReadJournal,
    Resumed,
    ResumeRequest,
)
from swarmllm_proto.ipc.kv import CheckOutcome, split_names
from swarmllm_proto.swarm.base import KeptPrefix
from swarmllm_proto.tensors import Tensor, encode_tensor

CANCEL_S = 1.0


class KeptPrefixes:
    """KV of prompts that workers keep, by the names of its blocks: looks it up, exports and imports it."""

    def __init__(self, hosts: HostedModels, cancel: Callable[[ModelId, str], Awaitable[None]]) -> None:
        """`cancel`: ends a request of a model, and frees what it has."""
        self._hosts = hosts
        self._cancel = cancel
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

    async def look_up_prefix(
        self, model: ModelFile, layers: LayerRange, names: bytes, scope: str = "", *, cuts: bool = False
    ) -> PrefixLookedUp:
        """How many of these blocks a request could get here, and how their KV would travel. `cuts`: segments
        for exactly these layers are made first where there are none."""
        worker = await self._hosts.of(model).ready()
        message = LookUpPrefix(
            id=worker.new_id(), start=layers.start, end=layers.end, scope=scope, cuts=cuts or UNSET
        )
        result, _ = await worker.call(
            message, PrefixLookedUp, payload=names, timeout_s=self._hosts.settings.call_timeout_s
        )
        return result

    async def check_prefix(
        self, model: ModelFile, layers: LayerRange, tokens: Tensor, blocks: tuple[int, ...], request_id: str
    ) -> CheckOutcome:
        """Compute blocks of KV again that `import_prefix` took from another node; `tokens`: of all blocks
        that came, i32 [n]. Raises WorkerError where they are not kept any more."""
        worker = await self._hosts.of(model).ready()
        message = CheckPrefix(
            id=worker.new_id(),
            request_id=request_id,
            start=layers.start,
            end=layers.end,
            blocks=blocks,
        )
        try:
            result, _ = await worker.call(
                message,
                PrefixChecked,
                payload=encode_tensor(tokens),
                timeout_s=self._hosts.settings.call_timeout_s,
            )
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(CANCEL_S):
                await self._cancel(model.model_id, request_id)
            raise
        return result.outcome

    async def export_prefix(
        self,
        model: ModelFile,
        layers: LayerRange,
        names: bytes,
        scope: str = "",
        *,
        first_row: int = 0,
        n_rows: int = 0,
        part: LayerRange | None = None,
        rounds: bool = False,
    ) -> tuple[PrefixSnapshotResponse, memoryview]:
        """The KV that is kept of the first so many of these blocks, as bytes for `import_prefix`; with
        `n_rows` only these rows of them, where all blocks are kept, and of `part` of the layers only.
        `rounds`: as q8_0, also where they are kept as f16."""
        worker = await self._hosts.of(model).ready()
        message = ExportPrefixSnapshot(
            id=worker.new_id(),
            start=layers.start,
            end=layers.end,
            scope=scope,
            first_row=first_row,
            n_rows=n_rows,
            layers=UNSET if part is None else (part.start, part.end),
            kv_type="q8_0" if rounds else UNSET,
        )
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
        *,
        from_peer: bool = False,
        other_format: bool = False,
    ) -> int:
        """Keep KV that another worker exported, of blocks with these names. How many blocks were taken: all,
        or 0 where there is no room. Raises WorkerError for bytes that are damaged or not of these layers.
        `from_peer`: another node exported it, in slices; `snapshot.digest` is that of their digests.
        `other_format`: its worker computes with other kernels or keeps another type, which is converted."""
        worker = await self._hosts.of(model).ready()
        message = ImportPrefixSnapshot(
            id=worker.new_id(),
            start=layers.start,
            end=layers.end,
            scope=scope,
            n_blocks=snapshot.n_blocks,
            sizes=snapshot.sizes,
            digest=snapshot.digest,
            from_peer=from_peer,
            other_format=other_format or UNSET,
        )
        result, _ = await worker.call(
            message,
            PrefixFetchResult,
            payload=[names, *as_pieces(data)],
            timeout_s=self._hosts.settings.call_timeout_s,
        )
        return result.n_blocks


class HeldRequests:
    """Requests whose pipeline broke: holds them, resumes them, and reads their journals."""

    def __init__(self, hosts: HostedModels) -> None:
        self._hosts = hosts

    async def hold(self, model_id: ModelId, request_id: str, hold_s: float) -> None:
        """Stop the request, but keep its KV and its journal for `resume`; unknown requests and absent workers
        are fine."""
        if (hosted := self._hosts.get(model_id)) is not None:
            hosted.forget(request_id)
        if (worker := self._hosts.worker(model_id)) is not None:
            message = HoldRequest(id=worker.new_id(), request_id=request_id, hold_s=hold_s)
            await worker.call(message, Done, timeout_s=self._hosts.settings.call_timeout_s)

    async def resume(
        self,
        model: ModelFile,
        *,
        request_id: str,
        resumes: str,
        n_rows: int,
        ranges: Sequence[LayerRange],
    ) -> tuple[KeptRows, ...]:
        """Gives the held KV of `resumes` to a request that has none yet: at most `n_rows` rows. Returns the
        kept rows of each range. Raises as `forward` does."""
        worker = await self._hosts.of(model).worker_for(request_id, 0)
        message = ResumeRequest(
            id=worker.new_id(),
            request_id=request_id,
            resumes=resumes,
            n_rows=n_rows,
            ranges=tuple((layers.start, layers.end) for layers in ranges),
        )
        resumed, _ = await worker.call(message, Resumed, timeout_s=self._hosts.settings.call_timeout_s)
        return resumed.kept

    async def read_journal(
        self, model: ModelFile, *, request_id: str, end: int, position: int, n_rows: int
    ) -> Hidden:
        """f32 [n_rows, n_embd]: what the layers before `end` gave. Raises as `forward` does."""
        worker = await self._hosts.of(model).worker_for(request_id, position)
        message = ReadJournal(
            id=worker.new_id(), request_id=request_id, end=end, position=position, n_rows=n_rows
        )
        _, payload = await worker.call(message, LayerResult, timeout_s=self._hosts.settings.call_timeout_s)
        return checked_tensor(payload, "journal", np.dtype(np.float32), 2, n_rows=n_rows)
