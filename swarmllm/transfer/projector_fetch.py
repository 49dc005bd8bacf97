"""Fetches the file of a projector from the nodes that announce it, by its BLAKE3.

Pieces come from several nodes side by side, as those of tensors do, but unlike them they cannot be checked
one by one: the digest covers the whole file. If the file is wrong and several nodes gave it, no node is
blamed, and each of them is asked for the whole file alone, in turn; a node that then gives a wrong file is
blamed. When a fetch is broken off, its bytes up to the first hole stay, and the next fetch continues there.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio
from blake3 import blake3
from msgspec import UnsetType

from swarmllm.errors import BadModel, DeadlineExceeded, NodeUnreachable, RemoteError, StoreFull, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.models.manifest import TensorEntry
from swarmllm.swarm.peers.trust import Note, TrustEvent
from swarmllm.swarm.router import Router
from swarmllm.transfer.fetch import run_lanes
from swarmllm.transfer.fetch_plan import FetchPlan, FetchTask
from swarmllm.transfer.piece_client import HolderBusy, PieceAbsent, PieceClient, WrongBytes
from swarmllm.transfer.settings import TransferSettings
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import ProjectorAnnounce

log = logging.getLogger(__name__)

SIZE_MAX: Final = 2**34
"""Bytes of a projector that somebody else announces; the largest that are published have about 2 GiB."""
_READ_BYTES: Final = 2**22


@dataclass(frozen=True, slots=True)
class GivenProjector:
    """A file that nodes announce."""

    digest: Digest
    size_bytes: int
    holders: tuple[NodeId, ...]


def most_given(announced: Mapping[NodeId, ProjectorAnnounce], n_embd: int) -> GivenProjector | None:
    """The projector that most of the nodes give, of the width of the model's rows; of several with as many,
    that with the smallest digest. None: nobody gives one."""
    given = {
        node_id: (each.projector, each.size_bytes)
        for node_id, each in announced.items()
        if each.n_embd == n_embd
        and not isinstance(each.size_bytes, UnsetType)
        and 0 < each.size_bytes <= SIZE_MAX
    }
    if not given:
        return None
    counts = Counter(given.values())
    best = min(counts, key=lambda said: (-counts[said], said))
    return GivenProjector(*best, tuple(sorted(n for n, said in given.items() if said == best)))


class ProjectorFetch:
    """One file. Run it once."""

    def __init__(
        self,
        router: Router,
        settings: TransferSettings,
        model_id: ModelId,
        given: GivenProjector,
        part: Path,
        progress: Callable[[int, int], None],
        note: Note,
    ) -> None:
        """`part`: where the file is written."""
        self._router = router
        self._settings = settings
        self._model_id = model_id
        self._given = given
        self._part = part
        self._progress = progress
        self._note = note
        self.n_bytes = 0
        """Received, right or wrong."""
        self.liars: set[NodeId] = set()
        self._sources: set[NodeId] = set()
        self._failure: SwarmLLMError | None = None
        self._changed = trio.Event()

    async def run(self) -> None:
        """The part is the file then. Raises NodeUnreachable where nobody gives all of it, BadModel where what
        they give is another file, StoreFull."""
        began_at = await trio.to_thread.run_sync(self._begin)
        holders = self._given.holders[: self._settings.max_holders]
        await self._fetch(holders, began_at)
        if await self._is_right():
            self._credit()
            return
        alone = self._sources if began_at == 0 else set(holders)
        if began_at == 0 and len(alone) == 1:
            self._blame(alone)
        else:
            for node_id in sorted(alone):
                await trio.to_thread.run_sync(self._forget)
                try:
                    await self._fetch((node_id,), 0)
                except NodeUnreachable:
                    continue
                if await self._is_right():
                    self._credit()
                    return
                self._blame({node_id})
        await trio.to_thread.run_sync(self._forget)
        raise BadModel(
            f"what other nodes give is not the projector {self._given.digest[:12]}", field="mmproj"
        )

    async def _fetch(self, holders: Iterable[NodeId], from_byte: int) -> None:
        """From these. Raises NodeUnreachable, StoreFull."""
        self._sources = set()
        size_bytes = self._given.size_bytes
        offsets = range(from_byte, size_bytes, PIECE_MAX)
        plan = FetchPlan([_piece_at(offset, size_bytes) for offset in offsets], holders)
        arrived: set[int] = set(range(0, from_byte, PIECE_MAX))
        lanes = [
            partial(self._lane, plan, node_id, arrived)
            for node_id in plan.holders
            for _ in range(self._settings.lanes_per_holder)
        ]
        try:
            await run_lanes(lanes)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._cut_off, arrived)
        if not plan.is_done:
            why = f" ({self._failure.message})" if self._failure else ""
            raise NodeUnreachable(f"no node gave all of the projector {self._given.digest[:12]}{why}")

    async def _lane(self, plan: FetchPlan, node_id: NodeId, arrived: set[int]) -> None:
        asking = PieceClient(self._router, self._settings, node_id, self._model_id)
        while node_id in plan.holders and not (plan.is_done or plan.is_stuck):
            task = plan.take(node_id)
            if task is None:
                await self._changed.wait()
                continue
            try:
                if await self._one(asking, plan, node_id, task):
                    arrived.add(task.tensor.offset)
                    done_bytes = min(len(arrived) * PIECE_MAX, self._given.size_bytes)
                    self._progress(done_bytes, self._given.size_bytes)
            finally:
                self._tell()
        self._tell()

    async def _one(self, asking: PieceClient, plan: FetchPlan, node_id: NodeId, task: FetchTask) -> bool:
        """Whether it has come. Raises only what must end the whole fetch."""
        piece = task.tensor
        try:
            data = await asking.piece(
                "projector", piece.offset, piece.size_bytes, projector=self._given.digest
            )
            self.n_bytes += len(data)
            if len(data) != piece.size_bytes:
                raise RemoteError(f"node {node_id} sent {len(data)} of {piece.size_bytes} bytes")
            await trio.to_thread.run_sync(self._write, bytes(data), piece.offset)
        except PieceAbsent as error:
            self._failure = error
            plan.absent(task, node_id)
        except (RemoteError, DeadlineExceeded) as error:
            self._failure = error
            provoked_by(log, node_id).info("fetching a projector from %s: %s", node_id, error.message)
            if isinstance(error, NodeUnreachable | HolderBusy):
                plan.gone(node_id)
            plan.failed(task, node_id, self._settings.max_failures)
        except BaseException:
            plan.put_back(task)
            raise
        else:
            task.sources.add(node_id)
            self._sources.add(node_id)
            plan.arrived(task)
            return True
        return False

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _credit(self) -> None:
        for node_id in self._sources:
            self._note(node_id, TrustEvent.GAVE_BYTES)

    def _blame(self, node_ids: Iterable[NodeId]) -> None:
        for node_id in node_ids:
            error = WrongBytes(f"node {node_id} sent another file than the projector that it announces")
            log.warning("wrong bytes of a projector: %s", error.message)
            self.liars.add(node_id)

    # Blocking.

    def _begin(self) -> int:
        """From which byte on it is to be fetched."""
        try:
            self._part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._part.open("ab") as file:
                here = min(file.tell(), self._given.size_bytes) // PIECE_MAX * PIECE_MAX
                file.truncate(here)
        except OSError as error:
            raise StoreFull(f"the projector cannot be written: {error.strerror}") from error
        return here

    def _write(self, data: bytes, at: int) -> None:
        try:
            with self._part.open("r+b") as file:
                file.seek(at)
                file.write(data)
        except OSError as error:
            raise StoreFull(f"the projector cannot be written: {error.strerror}") from error

    def _cut_off(self, arrived: set[int]) -> None:
        """What has come, up to the first hole."""
        at = 0
        while at in arrived:
            at += PIECE_MAX
        with suppress(OSError):
            os.truncate(self._part, min(at, self._given.size_bytes))

    def _forget(self) -> None:
        with suppress(OSError):
            os.truncate(self._part, 0)

    async def _is_right(self) -> bool:
        def digest() -> str:
            hasher = blake3()
            with self._part.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    trio.from_thread.check_cancelled()
                    hasher.update(data)
            return hasher.hexdigest()

        return await trio.to_thread.run_sync(digest) == self._given.digest


def _piece_at(offset: int, size_bytes: int) -> TensorEntry:
    """A piece of the file, as what a plan hands out."""
    n_bytes = min(PIECE_MAX, size_bytes - offset)
    return TensorEntry(
        name=str(offset), ggml_type=0, shape=(n_bytes,), offset=offset, size_bytes=n_bytes, blake3=""
    )
