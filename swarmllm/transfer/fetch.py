"""Fetches tensors from several holders at once, and checks each piece before it is written.

Every holder gets a few lanes, each of which takes a tensor from the plan, fetches it piece by piece and
writes it to the container; each piece is one chunk, which is checked before it is written. What a lane
leaves unfinished, because its holder failed or the whole fetch was cancelled, is saved as far as it came. The
fetch ends when everything is there, or when nobody who is asked has what is left.

Several tasks side by side on one piece of work: the first failure ends them all, and is the one told.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, MutableSequence, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import trio

from swarmllm.errors import (
    BadModel,
    DeadlineExceeded,
    NodeUnreachable,
    RemoteError,
    SwarmLLMError,
)
from swarmllm.log_filter import provoked_by
from swarmllm.models import CatalogueEntry, Store, TensorEntry
from swarmllm.models.hashing import CHUNK_BYTES, chunk_list_bytes, digest_of
from swarmllm.models.store import MAX_CONTAINER_HEADER_BYTES
from swarmllm.models.tensor_writer import TensorWriter
from swarmllm.swarm.peers.trust import Deed, Note, unnoted
from swarmllm.swarm.router import Router
from swarmllm.transfer.fetch_plan import FetchPlan, FetchTask
from swarmllm.transfer.settings import TransferSettings
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.limits import OUTLINE_MAX, PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, Outline, Piece

T = TypeVar("T")


async def run_lanes(lanes: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Raises the SwarmLLMError of the lane that failed first, when all have ended."""
    failure: SwarmLLMError | None = None

    async def run(lane: Callable[[], Awaitable[None]]) -> None:
        nonlocal failure
        try:
            await lane()
        except SwarmLLMError as error:
            failure = failure or error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for lane in lanes:
            nursery.start_soon(run, lane)
    if failure is not None:
        raise failure


async def share_out(n_lanes: int, pending: MutableSequence[T], act: Callable[[T], Awaitable[None]]) -> None:
    """`act` on each, `n_lanes` at a time; each leaves `pending` when its turn comes. Raises as
    `run_lanes`."""

    async def lane() -> None:
        while pending:
            await act(pending.pop(0))

    await run_lanes([lane] * min(n_lanes, len(pending)))


log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_outlines = msgspec.msgpack.Decoder(Outline)


class HolderBusy(RemoteError):
    """It said so for longer than anybody should wait."""


class PieceAbsent(RemoteError):
    """The holder does not have what it was asked for."""


class Lie(RemoteError):
    """The holder sent other bytes than the model's."""


class PieceClient:
    """Asks one holder for pieces, patiently while it is busy."""

    def __init__(
        self, router: Router, settings: TransferSettings, node_id: NodeId, model_id: ModelId
    ) -> None:
        self._router = router
        self._settings = settings
        self._node_id = node_id
        self._model_id = model_id
        self.n_bytes = 0

    async def piece(self, part: str, offset: int, size_bytes: int, tensor: str = "") -> memoryview:
        """Raises NotThere, RemoteError (NodeUnreachable, HolderBusy), DeadlineExceeded."""
        settings = self._settings
        request = msgspec.convert(
            {
                "type": "FetchPiece",
                "model_id": self._model_id,
                "part": part,
                "tensor": tensor,
                "offset": offset,
                "size_bytes": size_bytes,
            },
            FetchPiece,
        )
        pause_s = settings.busy_pause_s
        waited_s = 0.0
        while True:
            piece = await self._ask(request)
            if piece.status == "absent":
                raise PieceAbsent(f"node {self._node_id} does not have {tensor or part}")
            if piece.status == "ok":
                if len(piece.data) > size_bytes:
                    raise RemoteError(f"node {self._node_id} sent more than it was asked for")
                self.n_bytes += len(piece.data)
                return piece.data
            if waited_s >= settings.busy_timeout_s:
                raise HolderBusy(f"node {self._node_id} is busy")
            await trio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, settings.max_busy_pause_s)

    async def whole(self, part: str, max_bytes: int, tensor: str = "") -> bytes:
        """Raises as `piece` does, RemoteError above `max_bytes`."""
        data = bytearray()
        while len(data) <= max_bytes:
            piece = await self.piece(part, len(data), PIECE_MAX, tensor)
            data += piece
            if len(piece) < PIECE_MAX:
                return bytes(data)
        raise RemoteError(f"node {self._node_id}: its {part} is larger than {max_bytes} bytes")

    async def _ask(self, request: FetchPiece) -> Piece:
        body = encode_request(request)
        answer = await self._router.fetch(self._node_id, body, timeout_s=self._settings.piece_timeout_s)
        try:
            response = decode_response(answer)
        except ProtocolError as error:
            raise RemoteError(f"node {self._node_id} answered nonsense: {error}") from error
        if not isinstance(response, Piece):
            raise RemoteError(f"node {self._node_id} answered something else")
        return response


async def fetch_container(asking: PieceClient, store: Store, model_id: ModelId, name: str) -> CatalogueEntry:
    """A new container with the header that one holder has. Raises BadModel where that is not the model's,
    StoreFull, and what asking raises."""
    raw = await asking.whole("outline", OUTLINE_MAX)
    try:
        outline = await trio.to_thread.run_sync(_outlines.decode, raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise BadModel(f"the outline cannot be read: {type(error).__name__}") from None
    header = await asking.whole("header", min(outline.header_bytes, MAX_CONTAINER_HEADER_BYTES))
    return await trio.to_thread.run_sync(store.adopt, model_id, name, outline, header)


class Fetch:
    """Tensors of one container from some holders. Run it once."""

    def __init__(
        self,
        router: Router,
        store: Store,
        entry: CatalogueEntry,
        tensors: Sequence[TensorEntry],
        holders: Sequence[NodeId],
        settings: TransferSettings,
        progress: Progress,
        note: Note = unnoted,
    ) -> None:
        self.plan = FetchPlan(tensors, holders)
        self.n_bytes = 0
        """Received, right or wrong."""
        self._router = router
        self._store = store
        self._entry = entry
        self._settings = settings
        self._progress = progress
        self._note = note
        self._counted: dict[FetchTask, int] = {}
        self._total_bytes = sum(tensor.size_bytes for tensor in tensors)
        self._news = trio.Event()
        self._last_failure: SwarmLLMError | None = None

    async def run(self) -> None:
        """Raises NodeUnreachable where something is left that nobody gives, StoreFull, BadModel; what has
        arrived is kept."""
        await run_lanes(
            partial(self._lane, node_id)
            for node_id in sorted(self.plan.holders)
            for _ in range(self._settings.lanes_per_holder)
        )
        if not self.plan.is_done:
            left = self.plan.left
            why = f" ({self._last_failure.message})" if self._last_failure else ""
            raise NodeUnreachable(
                f"{len(left)} tensors of {self._entry.name} ({sum(t.size_bytes for t in left)} bytes), among"
                f" them {left[0].name}, could not be had from any node{why}; what has arrived is kept"
            )

    async def _lane(self, node_id: NodeId) -> None:
        asking = PieceClient(self._router, self._settings, node_id, self._entry.model_id)
        while node_id in self.plan.holders and not self.plan.is_done and not self.plan.is_stuck:
            task = self.plan.take(node_id)
            if task is None:
                await self._news.wait()
                continue
            try:
                await self._tensor(asking, node_id, task)
            finally:
                self._news.set()
                self._news = trio.Event()
        self._news.set()
        self._news = trio.Event()

    async def _tensor(self, asking: PieceClient, node_id: NodeId, task: FetchTask) -> None:
        """Fetch one tensor, or as much as the holder gives. Raises only what must end the whole fetch."""
        try:
            chunk_list = await self._chunk_list(asking, node_id, task.tensor)
            writer = await trio.to_thread.run_sync(
                self._store.open_tensor, self._entry, task.tensor, chunk_list
            )
            try:
                self._report(task, writer.n_bytes)
                await self._pieces(asking, node_id, task, writer)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_close, writer)
        except PieceAbsent:
            self.plan.absent(task, node_id)
        except Lie as error:
            self._last_failure = error
            log.warning("%s", error.message)
            self.plan.lied(task, node_id)
        except (RemoteError, DeadlineExceeded) as error:
            self._last_failure = error
            provoked_by(log, node_id).info(
                "fetching %s from %s: %s", task.tensor.name, node_id, error.message
            )
            if isinstance(error, NodeUnreachable | HolderBusy):
                self.plan.gone(node_id)
            self.plan.failed(task, node_id, self._settings.max_failures)
        else:
            self.plan.arrived(task)
            for source in task.sources:
                self._note(source, Deed.GAVE_BYTES)

    async def _chunk_list(self, asking: PieceClient, node_id: NodeId, tensor: TensorEntry) -> bytes:
        catalogue, model_id = self._store.catalogue, self._entry.model_id
        known = await trio.to_thread.run_sync(catalogue.chunk_list, model_id, tensor)
        if known is not None:
            return known
        chunk_list = await asking.whole("chunks", chunk_list_bytes(tensor.size_bytes), tensor.name)
        self.n_bytes += len(chunk_list)
        if digest_of(chunk_list) != tensor.blake3:
            raise Lie(f"node {node_id} sent a wrong chunk list of {tensor.name}")
        await trio.to_thread.run_sync(catalogue.keep_chunk_lists, model_id, {tensor.name: chunk_list})
        return chunk_list

    async def _pieces(
        self, asking: PieceClient, node_id: NodeId, task: FetchTask, writer: TensorWriter
    ) -> None:
        tensor = task.tensor
        while writer.n_bytes < tensor.size_bytes:
            n_bytes = min(CHUNK_BYTES, tensor.size_bytes - writer.n_bytes)
            data = await asking.piece("tensor", writer.n_bytes, n_bytes, tensor.name)
            if len(data) != n_bytes:
                raise RemoteError(f"node {node_id} sent {len(data)} of {n_bytes} bytes")
            self.n_bytes += len(data)
            if not await trio.to_thread.run_sync(writer.append_chunk, data):
                raise Lie(f"node {node_id} sent wrong bytes of {tensor.name}")
            task.sources.add(node_id)
            self._report(task, writer.n_bytes)
        await trio.to_thread.run_sync(writer.finish)

    def _report(self, task: FetchTask, n_bytes: int) -> None:
        self._counted[task] = n_bytes
        self._progress(sum(self._counted.values()), self._total_bytes)


def _close(writer: TensorWriter) -> None:
    try:
        writer.save()
    except SwarmLLMError as error:
        # Why the fetch ends is more useful than why its last bytes will be fetched again.
        log.info("%s is not kept: %s", writer.tensor.name, error.message)
    finally:
        writer.close()
