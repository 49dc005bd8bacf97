"""Fetches tensors from several holders at once, and checks each piece before it is written.

Every holder gets a few lanes, each of which takes a tensor from the plan, fetches it piece by piece and
writes it to the container; each piece is one chunk, which is checked before it is written. A tensor that a
lane leaves unfinished, because its holder failed or the whole fetch was cancelled, is saved as far as it
came. The fetch ends when everything is there, or when no holder has what is missing.

Several tasks side by side on one piece of work: the first failure ends them all, and is the one told.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from swarmllm.errors import (
    DeadlineExceeded,
    NodeUnreachable,
    RemoteError,
    StoreFull,
    SwarmLLMError,
)
from swarmllm.log_filter import provoked_by
from swarmllm.models import CatalogueEntry, Store, TensorEntry
from swarmllm.models.hashing import CHUNK_BYTES, chunk_list_bytes, digest_of
from swarmllm.models.tensor_writer import TensorWriter
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.router import Router
from swarmllm.transfer.fetch_plan import FetchPlan, FetchTask
from swarmllm.transfer.piece_client import HolderBusy, PieceAbsent, PieceClient, WrongBytes
from swarmllm.transfer.settings import TransferSettings
from swarmllm_proto.identifiers import NodeId

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


WEB = NodeId("")
"""In place of a node id: the hub."""
OPEN_TIMEOUT_S = 60.0
"""For finding out whether a hub has the file that a model was made from."""


class NotTheFile(SwarmLLMError):
    """The hub's file at this place is not the file of the model."""


ReadPublished = Callable[[int, int], AsyncGenerator[bytes, None]]
"""Bytes [start, end) of a file on a hub, in what portions they come."""


@dataclass(frozen=True)
class PublishedFile:
    """A place on a hub where a node says that the file of a model is. It is not trusted: every chunk is
    checked."""

    said_by: NodeId
    text: str
    open: Callable[[CatalogueEntry], AbstractAsyncContextManager[ReadPublished]]
    """Raises NotTheFile, and other SwarmLLMErrors where it cannot be had; reading raises RemoteError."""
    refuse: Callable[[], None] = lambda: None
    """Called where it is not the file."""


class Fetch:
    """Tensors of one container from some holders, and from a hub where one has them. Run it once."""

    def __init__(
        self,
        router: Router,
        store: Store,
        entry: CatalogueEntry,
        tensors: Sequence[TensorEntry],
        holders: Sequence[NodeId],
        settings: TransferSettings,
        progress: Progress,
        note: Note = ignored_event,
        published: Sequence[PublishedFile] = (),
    ) -> None:
        """`published`: the first of them that has the model's bytes gives some of them."""
        self.plan = FetchPlan(tensors, [*holders, *([WEB] if published else ())])
        self._holders = sorted(holders)
        self._published = published
        self.n_bytes = 0
        """Received, right or wrong."""
        self._from_nodes_bytes = self._from_hub_bytes = 0
        """Of tensors."""
        self._from_hub: dict[FetchTask, trio.CancelScope] = {}
        self._router = router
        self._store = store
        self._entry = entry
        self._settings = settings
        self._progress = progress
        self._note = note
        self._counted: dict[FetchTask, int] = {}
        self._total_bytes = sum(tensor.size_bytes for tensor in tensors)
        self._changed = trio.Event()
        self._last_failure: SwarmLLMError | None = None

    async def run(self) -> None:
        """Raises NodeUnreachable where something is left that nobody gives, StoreFull, BadModel; what has
        arrived is kept."""
        lanes = [
            partial(self._lane, node_id)
            for node_id in self._holders
            for _ in range(self._settings.lanes_per_holder)
        ]
        await run_lanes([*lanes, *([self._from_web] if self._published else ())])
        if not self.plan.is_done:
            left = self.plan.left
            why = f" ({self._last_failure.message})" if self._last_failure else ""
            raise NodeUnreachable(
                f"{len(left)} tensors of {self._entry.name} ({sum(t.size_bytes for t in left)} bytes), among"
                f" them {left[0].name}, could not be had from any node{why}; what has arrived is kept"
            )

    async def _lane(self, node_id: NodeId) -> None:
        asking = PieceClient(self._router, self._settings, node_id, self._entry.model_id)
        while node_id in self.plan.holders and not self._is_over:
            task = self.plan.take(node_id)
            if task is None:
                self._take_over(node_id)
                await self._changed.wait()
                continue
            try:
                await self._tensor(asking, node_id, task)
            finally:
                self._tell()
        self._tell()

    async def _from_web(self) -> None:
        """Ends when nothing is left, and holds nobody up."""
        with trio.CancelScope() as scope:
            await run_lanes([partial(self._cancel_when_over, scope), self._read_published])

    async def _cancel_when_over(self, scope: trio.CancelScope) -> None:
        while not self._is_over:
            await self._changed.wait()
        scope.cancel()

    @property
    def _is_over(self) -> bool:
        return self.plan.is_done or self.plan.is_stuck

    async def _read_published(self) -> None:
        for published in self._published:
            try:
                async with AsyncExitStack() as stack:
                    with trio.fail_after(OPEN_TIMEOUT_S):
                        read = await stack.enter_async_context(published.open(self._entry))
                    await run_lanes([partial(self._web_lane, read)] * self._settings.lanes_per_holder)
                break
            except NotTheFile as error:
                published.refuse()
                self._last_failure = error
                provoked_by(log, published.said_by).warning(
                    "%s is not the file of %s, as node %s says: %s",
                    published.text,
                    self._entry.name,
                    published.said_by,
                    error.message,
                )
            except StoreFull:
                raise
            except (SwarmLLMError, trio.TooSlowError) as error:
                why = error.message if isinstance(error, SwarmLLMError) else "too slow"
                provoked_by(log, published.said_by).info(
                    "%s, which node %s names: %s", published.text, published.said_by, why
                )
            except Exception:
                # A mistake of ours, or of a library, in what a hub sent: it costs the hub's help only.
                provoked_by(log, published.said_by).exception("reading %s failed", published.text)
        self.plan.gone(WEB)
        self._tell()

    async def _web_lane(self, read: ReadPublished) -> None:
        """Raises NotTheFile, and what ends the whole fetch."""
        while WEB in self.plan.holders and not self._is_over:
            task = self.plan.take(WEB)
            if task is None:
                await self._changed.wait()
                continue
            scope = self._from_hub[task] = trio.CancelScope()
            try:
                with scope:
                    await self._published_tensor(read, task)
            except (RemoteError, DeadlineExceeded) as error:
                self._last_failure = error
                log.info("fetching %s from the hub: %s", task.tensor.name, error.message)
                self.plan.failed(task, WEB, self._settings.max_failures)
            except BaseException:
                self.plan.put_back(task)
                raise
            else:
                if scope.cancelled_caught:
                    self.plan.put_back(task)
                else:
                    self.plan.arrived(task)
            finally:
                del self._from_hub[task]
                self._tell()
            if scope.cancelled_caught:
                # The node that takes it over has its turn first.
                await self._changed.wait()

    def _take_over(self, node_id: NodeId) -> None:
        """A node that has nothing to do goes on with what a hub gives more slowly than the nodes."""
        if self._from_hub_bytes < self._from_nodes_bytes:
            for task, scope in self._from_hub.items():
                if node_id not in task.not_at and not scope.cancel_called:
                    scope.cancel()
                    return

    async def _published_tensor(self, read: ReadPublished, task: FetchTask) -> None:
        tensor = task.tensor
        chunk_list = await self._any_chunk_list(tensor)
        writer = await trio.to_thread.run_sync(self._store.open_tensor, self._entry, tensor, chunk_list)
        try:
            self._report(task, writer.n_bytes)
            chunk = bytearray()
            end = tensor.offset + tensor.size_bytes
            async with aclosing(read(tensor.offset + writer.n_bytes, end)) as portions:
                while writer.n_bytes < tensor.size_bytes:
                    n_bytes = min(CHUNK_BYTES, tensor.size_bytes - writer.n_bytes)
                    with trio.move_on_after(self._settings.piece_timeout_s):
                        while len(chunk) < n_bytes and (portion := await anext(portions, None)):
                            chunk += portion
                    if len(chunk) < n_bytes:
                        raise DeadlineExceeded(f"the hub gave {len(chunk)} of {n_bytes} bytes in time")
                    self.n_bytes += n_bytes
                    self._from_hub_bytes += n_bytes
                    if not await trio.to_thread.run_sync(writer.append_chunk, bytes(chunk[:n_bytes])):
                        raise NotTheFile(f"it has other bytes of {tensor.name}")
                    del chunk[:n_bytes]
                    self._report(task, writer.n_bytes)
            await trio.to_thread.run_sync(writer.finish)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(_close, writer)

    async def _any_chunk_list(self, tensor: TensorEntry) -> bytes:
        """Known here, or from a node that has it. Raises NodeUnreachable."""
        failure: SwarmLLMError | None = None
        for node_id in self._holders:
            if node_id not in self.plan.holders:
                continue
            asking = PieceClient(self._router, self._settings, node_id, self._entry.model_id)
            try:
                return await self._chunk_list(asking, node_id, tensor)
            except (RemoteError, DeadlineExceeded) as error:
                failure = error
        raise failure or NodeUnreachable(f"nobody is there who could tell what {tensor.name} hashes to")

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

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
        except WrongBytes as error:
            self._last_failure = error
            log.warning("wrong bytes of a model: %s", error.message)
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
                self._note(source, TrustEvent.GAVE_BYTES)

    async def _chunk_list(self, asking: PieceClient, node_id: NodeId, tensor: TensorEntry) -> bytes:
        catalogue, model_id = self._store.catalogue, self._entry.model_id
        known = await trio.to_thread.run_sync(catalogue.chunk_list, model_id, tensor)
        if known is not None:
            return known
        chunk_list = await asking.whole("chunks", chunk_list_bytes(tensor.size_bytes), tensor.name)
        self.n_bytes += len(chunk_list)
        if digest_of(chunk_list) != tensor.blake3:
            raise WrongBytes(f"node {node_id} sent a wrong chunk list of {tensor.name}")
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
            self._from_nodes_bytes += len(data)
            if not await trio.to_thread.run_sync(writer.append_chunk, data):
                raise WrongBytes(f"node {node_id} sent wrong bytes of {tensor.name}")
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
