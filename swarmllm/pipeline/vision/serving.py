"""Encodes pictures and sounds for other nodes; what is said of pictures here holds for sounds.

A picture takes one place from its first slice to its last row. Places are shared among the asking nodes as
those for requests are, and pictures of others are encoded one at a time: one of this node's users waits for
one of them at most. What a place holds is charged to the node that asked, and gone when the place is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import trio
from blake3 import blake3
from msgspec import UNSET

from swarmllm.errors import InvalidRequest, Overloaded, SwarmLLMError, WorkerDied
from swarmllm.log_filter import provoked_by
from swarmllm.models.projector import Projector
from swarmllm.pictures import name_of, parse_medium
from swarmllm.pipeline.own_models import FindsOwnModels
from swarmllm.pipeline.prefix.choice import AvoidedPeers
from swarmllm.pipeline.stage.capacity import OriginShares, StagePlace
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.tasks import SpawnsTasks
from swarmllm.pipeline.vision.slices import HALF, parts_of, rows_each
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Grant
from swarmllm.swarm.peers.trust import EARNED_MIN, NodeTrust, TrustEvent
from swarmllm.workerpool.encoders import EncodedPicture
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.half_rows import pack_half, rounded_to_half
from swarmllm_proto.half_rows import rows_each as half_rows_each
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.ipc import PicturePart
from swarmllm_proto.limits import PICTURE_BYTES_MAX, PICTURE_ROWS_BYTES_MAX
from swarmllm_proto.swarm import VisionEncodeRequest, VisionEncodeResponse
from swarmllm_proto.swarm.vision import NoRows, bound_digest

log = logging.getLogger(__name__)

PLACES: Final = 8
ANSWER_S: Final = 1.0
"""Within which a request is answered, with rows or without: the sender knows that this node lives."""
SLICE_S: Final = 60.0
"""So long a place is kept for the next request of its picture."""
Key = tuple[NodeId, str]
"""(asking node, request id)"""


class NotEncoded(Exception):
    """There are no rows; the text is the reason that is sent to the asking node."""

    def __init__(self, error: NoRows, why: str) -> None:
        super().__init__(why)
        self.error = error


@dataclass(frozen=True, slots=True)
class _Slice:
    first_row: int
    n_rows: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class _Rows:
    n_rows: int
    n_embd: int
    parts: tuple[PicturePart, ...]
    digest: bytes
    slices: tuple[_Slice, ...]
    is_packed: bool
    """As `half_rows` does it; else f32, little-endian."""

    def response(self, request_id: str, first_row: int, size_bytes: int) -> tuple[VisionEncodeResponse, bool]:
        """The slice with `first_row`, and whether it is the last one. `size_bytes`: of the picture."""
        here = next((each for each in self.slices if each.first_row >= first_row), self.slices[-1])
        is_first = not here.first_row
        response = VisionEncodeResponse(
            request_id=request_id,
            n_rows=self.n_rows,
            n_embd=self.n_embd,
            rows=here.data,
            n_received=size_bytes,
            parts=self.parts if is_first else UNSET,
            digest=self.digest if is_first else UNSET,
            rows_as=HALF if self.is_packed else UNSET,
            n_here=here.n_rows if self.is_packed else UNSET,
        )
        return response, here is self.slices[-1]


@dataclass(slots=True, eq=False)
class _Encoding:
    """One picture of one asking node."""

    key: Key
    model: ModelFile
    projector: Projector
    digest: Digest
    """That the picture must have."""
    size_bytes: int
    assigned_s: float
    grant: Grant
    may_round: bool = False
    """Its rows may go as f16."""
    data: bytearray = field(default_factory=bytearray)
    has_begun: bool = False
    rows: _Rows | None = None
    failure: NotEncoded | None = None
    is_given: bool = False
    heard_s: float = 0.0
    changed: trio.Event = field(default_factory=trio.Event)
    """Something came from the sender, or the end of the encoding."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def is_settled(self) -> bool:
        return self.rows is not None or self.failure is not None

    def tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class PictureServing:
    def __init__(
        self,
        compute: Compute,
        own_models: FindsOwnModels,
        counts: PipelineStatistics,
        trust: NodeTrust,
        budget: ByteBudget,
        tasks: SpawnsTasks,
        n_places: int = PLACES,
    ) -> None:
        self._compute = compute
        self._own_models = own_models
        self._counts = counts
        self._trust = trust
        self._budget = budget
        self._tasks = tasks
        self._shares = OriginShares(n_places)
        self._encodings: dict[Key, _Encoding] = {}
        """They are in no Session: a node that encodes need not run a stage of the request."""
        self._turn = trio.Lock()
        self._avoided = AvoidedPeers()
        """Nodes whose pictures have just ended an encoder's process."""

    def __len__(self) -> int:
        """Pictures that have a place."""
        return len(self._encodings)

    def lost(self, node_id: NodeId) -> None:
        """The node is gone, and what it asked for with it."""
        for encoding in [each for each in self._encodings.values() if each.key[0] == node_id]:
            encoding.scope.cancel()

    def cancel(self, sender: NodeId, request_id: str) -> bool:
        """Its rows are not wanted any more. False: nothing is known of it."""
        if (encoding := self._encodings.get((sender, request_id))) is None:
            return False
        encoding.scope.cancel()
        return True

    async def answer(self, sender: NodeId, request: VisionEncodeRequest) -> VisionEncodeResponse:
        """Raises InvalidRequest for slices that fit no picture."""
        try:
            encoding = self._encodings.get((sender, request.request_id))
            if encoding is None:
                encoding = await self._begin(sender, request)
            encoding.heard_s = trio.current_time()
            self._take(encoding, request)
            if len(encoding.data) == encoding.size_bytes or encoding.has_begun:
                with trio.move_on_after(ANSWER_S):
                    while not encoding.is_settled:
                        await encoding.changed.wait()
            return self._response(encoding, request)
        except NotEncoded as reason:
            provoked_by(log, sender).info("a picture of %s is not encoded: %s", sender, reason)
            return VisionEncodeResponse(request_id=request.request_id, error=reason.error)

    async def _begin(self, sender: NodeId, request: VisionEncodeRequest) -> _Encoding:
        """Raises NotEncoded, InvalidRequest."""
        size_bytes = len(request.image) if request.size_bytes is UNSET else request.size_bytes
        if size_bytes > PICTURE_BYTES_MAX:
            self._trust.note(sender, TrustEvent.BAD_REQUEST, "a picture that is too large")
            raise InvalidRequest(f"a picture has {PICTURE_BYTES_MAX} bytes at most", field="size_bytes")
        if request.offset or request.first_row or not request.image:
            raise NotEncoded("VisionEncoderUnavailable", "nothing is known of it here any more")
        try:
            entry = await self._own_models.get(request.model_id)
        except SwarmLLMError:
            raise NotEncoded("VisionEncoderUnavailable", "the model is not here") from None
        projector = entry.projector
        if projector is None or projector.blake3 != request.projector or request.digest is UNSET:
            raise NotEncoded("VisionEncoderUnavailable", "the projector is not here")
        # From here on without a pause: what is checked still holds when the place is taken.
        key, now_s = (sender, request.request_id), trio.current_time()
        if key in self._encodings:
            return self._encodings[key]
        if self._avoided.has(sender, now_s):
            raise NotEncoded("Busy", "the last one ended the encoder's process")
        self._make_room(sender, now_s)
        grant = self._budget.reserve(sender, BudgetKind.JOBS, size_bytes)
        if grant is None:
            raise NotEncoded("Busy", "there is no memory for it")
        encoding = _Encoding(
            key,
            ModelFile.of(entry),
            projector,
            request.digest,
            size_bytes,
            now_s,
            grant,
            may_round=request.rows_as == HALF,
            heard_s=now_s,
        )
        self._encodings[key] = encoding
        try:
            self._tasks.spawn(partial(self._run, encoding))
        except SwarmLLMError:
            self._drop(encoding)
            raise
        return encoding

    def _make_room(self, sender: NodeId, now_s: float) -> None:
        """Raises NotEncoded."""
        places = [
            # Ids of two nodes may be the same.
            StagePlace("\n".join(each.key), each.key[0], each.assigned_s, each.has_begun)
            for each in self._encodings.values()
        ]
        admission = self._shares.ask(sender, places, now_s, self._has_earned)
        if not admission.is_granted:
            raise NotEncoded("Busy", "all places are taken")
        if admission.instead_of is not None:
            given_up = next(k for k in self._encodings if "\n".join(k) == admission.instead_of)
            encoding = self._encodings.pop(given_up)
            encoding.failure = NotEncoded("Busy", "others need the place")
            encoding.scope.cancel()
            encoding.tell()

    def _has_earned(self, node_id: NodeId) -> bool:
        return self._trust.score(node_id) >= EARNED_MIN

    def _take(self, encoding: _Encoding, request: VisionEncodeRequest) -> None:
        """The next slice; one that is here already changes nothing. Raises InvalidRequest."""
        offset = 0 if request.offset is UNSET else request.offset
        if not request.image or encoding.has_begun or offset != len(encoding.data):
            return
        if offset + len(request.image) > encoding.size_bytes:
            self._trust.note(encoding.key[0], TrustEvent.BROKE_PROTOCOL, "a picture larger than it was to be")
            encoding.scope.cancel()
            raise InvalidRequest("the picture is larger than it was to be", field="image")
        encoding.data += request.image
        encoding.tell()

    def _response(self, encoding: _Encoding, request: VisionEncodeRequest) -> VisionEncodeResponse:
        """Raises NotEncoded."""
        if encoding.failure is not None:
            encoding.is_given = True
            encoding.tell()
            raise encoding.failure
        rows = encoding.rows
        if rows is None:
            n_received = encoding.size_bytes if encoding.has_begun else len(encoding.data)
            return VisionEncodeResponse(request_id=request.request_id, n_received=n_received)
        response, encoding.is_given = rows.response(
            request.request_id, request.first_row, encoding.size_bytes
        )
        encoding.tell()
        return response

    async def _run(self, encoding: _Encoding) -> None:
        """Until its last row is given, or nobody asks any more."""
        try:
            with encoding.scope:
                if not await self._wait(encoding, lambda: len(encoding.data) == encoding.size_bytes):
                    return
                try:
                    encoding.rows = await self._encode(encoding)
                except NotEncoded as reason:
                    encoding.failure = reason
                encoding.tell()
                await self._wait(encoding, lambda: encoding.is_given)
        finally:
            if encoding.failure is None and encoding.rows is None:
                encoding.failure = NotEncoded("VisionEncoderUnavailable", "its encoding was ended")
            self._drop(encoding)
            encoding.tell()

    async def _wait(self, encoding: _Encoding, is_so: Callable[[], bool]) -> bool:
        """False: nothing was heard of it for too long."""
        while not is_so():
            until_s = encoding.heard_s + SLICE_S
            if trio.current_time() >= until_s:
                return False
            with trio.move_on_at(until_s):
                await encoding.changed.wait()
        return True

    def _drop(self, encoding: _Encoding) -> None:
        encoding.grant.release()
        if self._encodings.get(encoding.key) is encoding:
            del self._encodings[encoding.key]

    async def _encode(self, encoding: _Encoding) -> _Rows:
        """Raises NotEncoded."""
        sender = encoding.key[0]
        encoding.has_begun = True
        data, encoding.data = bytes(encoding.data), bytearray()
        try:
            if await trio.to_thread.run_sync(lambda: blake3(data).hexdigest()) != encoding.digest:
                self._trust.note(sender, TrustEvent.DAMAGED, "a picture")
                raise NotEncoded("VisionEncoderUnavailable", "it came damaged")
            picture = parse_medium(data, "image")
            if name_of(picture) not in encoding.projector.takes:
                raise NotEncoded("VisionEncoderUnavailable", f"its projector takes no {name_of(picture)}s")
            async with self._turn:
                encoded = await self._compute.encode_picture(
                    encoding.model, encoding.projector, picture, is_kept=False
                )
        except InvalidRequest as error:
            raise NotEncoded("BadImage", error.message) from None
        except WorkerDied as error:
            self._avoided.add(sender, trio.current_time())
            raise NotEncoded("EncoderDied", error.message) from None
        except Overloaded as error:
            raise NotEncoded("Busy", error.message) from None
        except SwarmLLMError as error:
            raise NotEncoded("VisionEncoderUnavailable", error.message) from None
        rows = encoded.rows
        if rows.nbytes > PICTURE_ROWS_BYTES_MAX or not rows_each(rows.shape[1]):
            raise NotEncoded("VisionEncoderUnavailable", f"{rows.nbytes} bytes of rows are too many")
        if not encoding.grant.grow(rows.nbytes):
            raise NotEncoded("Busy", "there is no memory for its rows")
        self._counts.pictures_given += 1
        return await trio.to_thread.run_sync(_bound, encoding.model.model_id, encoding, encoded)


def _bound(model_id: ModelId, encoding: _Encoding, encoded: EncodedPicture) -> _Rows:
    n_rows, n_embd = encoded.rows.shape
    n_each = half_rows_each(n_embd)
    half = rounded_to_half(encoded.rows) if encoding.may_round and n_each else None
    rows = encoded.rows if half is None else half
    data = np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8).data
    parts = parts_of(encoded)
    digest = bound_digest(model_id, Digest(encoding.projector.blake3), encoding.digest, parts, data)
    if half is None:
        n_each = rows_each(n_embd)
    slices = []
    for first in range(0, n_rows, n_each):
        end = min(first + n_each, n_rows)
        raw = data[4 * n_embd * first : 4 * n_embd * end]
        slices.append(
            _Slice(first, end - first, raw if half is None else memoryview(pack_half(half[first:end])))
        )
    return _Rows(n_rows, n_embd, parts, digest, tuple(slices), half is not None)
