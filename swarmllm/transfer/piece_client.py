"""Asks one holder for pieces of a model, and for its outline and header, which tell where the pieces
belong."""

from __future__ import annotations

import msgspec
import trio

from swarmllm.errors import BadModel, RemoteError
from swarmllm.models import CatalogueEntry, Store
from swarmllm.models.store import MAX_CONTAINER_HEADER_BYTES
from swarmllm.swarm.router import Router
from swarmllm.transfer.settings import TransferSettings
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.limits import OUTLINE_MAX, PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, Outline, Piece

_outlines = msgspec.msgpack.Decoder(Outline)


class HolderBusy(RemoteError):
    """The holder has been busy for too long."""


class PieceAbsent(RemoteError):
    """The holder does not have what it was asked for."""


class WrongBytes(RemoteError):
    """The holder sent other bytes than the model's."""


class PieceClient:
    """Asks one holder for pieces; waits while it is busy."""

    def __init__(
        self, router: Router, settings: TransferSettings, node_id: NodeId, model_id: ModelId
    ) -> None:
        self._router = router
        self._settings = settings
        self._node_id = node_id
        self._model_id = model_id
        self.n_bytes = 0

    async def piece(
        self, part: str, offset: int, size_bytes: int, tensor: str = "", projector: Digest | None = None
    ) -> memoryview:
        """`tensor` and `projector`: as `FetchPiece` has them. Raises PieceAbsent, RemoteError
        (NodeUnreachable, HolderBusy), DeadlineExceeded."""
        settings = self._settings
        request = msgspec.convert(
            {
                "type": "FetchPiece",
                "model_id": self._model_id,
                "part": part,
                "tensor": tensor,
                "offset": offset,
                "size_bytes": size_bytes,
                **({} if projector is None else {"projector": projector}),
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
