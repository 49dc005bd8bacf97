"""Answers requests of other nodes: bytes of models, states of stages, rows to check, kept KV, and encoded
pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import trio

from swarmllm.pipeline.check.evidence import answer
from swarmllm.pipeline.prefix.serving import PrefixServing
from swarmllm.pipeline.route.local_load import LocalLoad
from swarmllm.pipeline.stage.admission import Sessions
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.inbox import Inbox
from swarmllm.pipeline.vision.serving import PictureServing
from swarmllm_proto.codec import encode_response
from swarmllm_proto.file_digests import AnyRequest, AnyResponse, Digests, FetchDigests
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import (
    RUNNING_MAX,
    FetchPiece,
    FetchRows,
    Piece,
    PrefixKv,
    PrefixKvFetch,
    ProbeStage,
    RowsPiece,
    TellPrompt,
    VisionEncodeRequest,
)


class ServesPieces(Protocol):
    async def answer(self, request: FetchPiece, /) -> Piece:
        """The bytes of a model that another node asks for."""
        ...


class ServesDigests(Protocol):
    async def answer(self, sender: NodeId, question: FetchDigests, /) -> Digests:
        """What this node knows of a file that it and others have parts of."""
        ...


@dataclass(frozen=True, slots=True)
class RequestHandler:
    inbox: Inbox
    sessions: Sessions
    compute: Compute
    pieces: ServesPieces | None
    digests: ServesDigests | None
    prefixes: PrefixServing | None
    here: LocalLoad
    pictures: PictureServing
    work_began: Callable[[], None]
    """Called when one of them is for this node's layers or projectors."""

    async def on_request(self, sender: NodeId, body: bytes) -> bytes:
        """Raises SwarmLLMError, which the sender is told."""
        return encode_response(await self._answer(sender, self.inbox.read_request(sender, body)))

    async def _answer(self, sender: NodeId, request: AnyRequest) -> AnyResponse:
        if isinstance(request, FetchPiece):
            return await self.pieces.answer(request) if self.pieces else Piece(status="absent")
        if isinstance(request, FetchDigests):
            unknown = Digests(status="unknown")
            return await self.digests.answer(sender, request) if self.digests else unknown
        if isinstance(request, ProbeStage):
            return self.sessions.state(sender, request.request_id)
        if isinstance(request, TellPrompt):
            return self.sessions.take_prompt(sender, request)
        if isinstance(request, FetchRows):
            refused = self.sessions.ended.answer(sender, request, trio.current_time())
            session = self.sessions.session_for(sender, request.request_id)
            if refused is not None or session is None:
                return refused or RowsPiece(request_id=request.request_id, known=False)
            return await answer(self.compute, session.context, request, session.row_committer)
        if isinstance(request, PrefixKvFetch):
            nothing = PrefixKv(status="absent")
            return await self.prefixes.answer(sender, request) if self.prefixes else nothing
        if isinstance(request, VisionEncodeRequest):
            self.work_began()
            return await self.pictures.answer(sender, request)
        ack = await self.sessions.acknowledge(sender, request)
        if not ack.accepted:
            return ack
        self.work_began()
        n_running = min(max(0, self.here.n_running() - 1), RUNNING_MAX)
        return msgspec.structs.replace(ack, n_running=n_running)
