"""A pool that gives and takes KV of prompts' beginnings, of a model that is arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import trio
from blake3 import blake3

from bench.common.arithmetic import FakePool
from swarmllm.models.layers import LayerRange
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import PrefixLookedUp, PrefixSnapshotResponse
from swarmllm_proto.swarm import KeptPrefix

BLOCK = BLOCK_TOKENS


class GivingPool(FakePool):
    """It gives and takes what it keeps: the rows of each layer, as numbers."""

    def __init__(self, *ranges: str) -> None:
        super().__init__(*ranges)
        self.from_peer: set[bytes] = set()
        self.gives_after_s = 0.0

    def kept_prefixes(self) -> Mapping[ModelId, tuple[KeptPrefix, ...]]:
        return {}

    def n_kept(self, layers: LayerRange, names: bytes, scope: str) -> int:
        wanted = [names[at : at + 32] for at in range(0, len(names), 32)]
        return next(
            (i for i, name in enumerate(wanted) if (scope, str(layers), name) not in self.kept), len(wanted)
        )

    def _keep_what_is_held(self) -> None:
        """It is given as well."""
        for request_id in self.held:
            self._keep(self.slots[request_id])

    async def look_up_prefix(
        self, model: Any, layers: LayerRange, names: bytes, scope: str = "", *, cuts: bool = False
    ) -> PrefixLookedUp:
        await trio.lowlevel.checkpoint()
        n_blocks = self.n_kept(layers, names, scope)
        return PrefixLookedUp(id=1, n_blocks=n_blocks, row_bytes=8 * len(layers), kv_format="f16")

    async def export_prefix(
        self,
        model: Any,
        layers: LayerRange,
        names: bytes,
        scope: str = "",
        *,
        first_row: int = 0,
        n_rows: int = 0,
        part: LayerRange | None = None,
        rounds: bool = False,
    ) -> tuple[PrefixSnapshotResponse, memoryview]:
        await trio.sleep(self.gives_after_s)
        self._keep_what_is_held()
        n_blocks, part = len(names) // 32, part or layers
        if self.n_kept(layers, names, scope) < n_blocks or names[:32] in self.from_peer:
            return PrefixSnapshotResponse(id=1, n_blocks=0), memoryview(b"")
        rows = np.zeros((n_rows, len(part)), "<i8")
        for i in range(n_rows):
            at = first_row + i
            name = names[at // BLOCK * 32 :][:32]
            for layer in range(part.start, part.end):
                rows[i, layer - part.start] = self.kept[scope, str(layers), name][layer][at % BLOCK]
        data = rows.tobytes()
        digest = blake3(data).hexdigest()
        return PrefixSnapshotResponse(id=1, n_blocks=n_blocks, digest=digest), memoryview(data)

    async def import_prefix(
        self,
        model: Any,
        layers: LayerRange,
        names: bytes,
        snapshot: PrefixSnapshotResponse,
        data: Any,
        scope: str = "",
        *,
        from_peer: bool = False,
        other_format: bool = False,
    ) -> int:
        await trio.lowlevel.checkpoint()
        assert from_peer
        assert not other_format
        rows = np.frombuffer(b"".join(data), "<i8").reshape(-1, len(layers))
        assert len(rows) == snapshot.n_blocks * BLOCK
        for i in range(snapshot.n_blocks):
            block = rows[i * BLOCK : (i + 1) * BLOCK]
            self.kept[scope, str(layers), names[i * 32 :][:32]] = {
                layers.start + column: block[:, column].tolist() for column in range(len(layers))
            }
        self.from_peer.add(names[:32])
        return snapshot.n_blocks

    async def check_prefix(self, *arguments: Any) -> Any:
        raise AssertionError("a stage has no tokens")
