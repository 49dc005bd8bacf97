"""Asks one node to encode one picture, and believes only what can be checked of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

import trio
from msgspec import UNSET

from swarmllm.errors import DeadlineExceeded, NodeBusy, NodeUnreachable, SwarmLLMError
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pictures import Medium
from swarmllm.pipeline.request import new_request_id
from swarmllm.pipeline.vision.slices import HALF, WrongPicture, assembled, require_places, rows_of
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.router import Router
from swarmllm.workerpool.encoders import PICTURE_TIMEOUT_S, EncodedPicture, Key
from swarmllm_proto.codec import decode_response, encode_job, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import Digest, NodeId
from swarmllm_proto.limits import IMAGE_MAX, PICTURE_ROWS_BYTES_MAX
from swarmllm_proto.swarm import CancelInference, VisionEncodeRequest, VisionEncodeResponse

SILENCE_S: Final = 10.0
"""A node that lives answers within half of it; what an answer takes to travel comes on top."""
SLOWEST: Final = 125_000
"""Bytes per second: 1 Mbit/s. Slices that come more slowly are silence."""
TRAVEL_S: Final = 60.0
"""What all slices of a picture, or of its rows, may take besides that."""
ENCODING_S: Final = PICTURE_TIMEOUT_S + 30.0
"""For one picture on one node, from its last slice to its first row: what an encoder may take, and its
turn."""

LEAVING_S: Final = 1.0
"""For telling a node that its rows are not wanted any more."""

Why = Literal["busy", "bad picture", "died", "absent", "failed"]


class NoAnswer(Exception):
    """A node gave no rows. `event`: its fault, if it has one."""

    def __init__(self, why: Why, text: str, event: TrustEvent | None = None) -> None:
        super().__init__(text)
        self.why: Why = why
        self.trust_event = event


@dataclass(frozen=True, slots=True)
class PictureQuestion:
    entry: CatalogueEntry
    projector: Digest
    picture: Medium
    may_round: bool = False
    """Its rows may come rounded to f16."""
    original: str = ""
    """BLAKE3 of the file of which `picture` was made; empty: it is that file."""

    @property
    def key(self) -> Key:
        """Under which its rows are kept."""
        return self.entry.model_id, self.projector, self.original or self.picture.digest


async def ask(
    router: Router,
    budget: ByteBudget,
    node_id: NodeId,
    question: PictureQuestion,
    heard: Callable[[], None] = lambda: None,
) -> EncodedPicture:
    """`heard` is called with each answer. A node that is left before its last row is told so. Raises
    NoAnswer."""
    asking = _PictureExchange(router, node_id, question, new_request_id(), heard)
    try:
        with _travelling(len(question.picture.data)):
            first = await asking.brought()
        first = first or await asking.encoded()
        size_bytes = 4 * first.n_rows * first.n_embd
        grant = budget.reserve(node_id, BudgetKind.MESSAGES, size_bytes)
        if grant is None:
            raise NoAnswer("busy", "there is no memory for the rows here")
        with grant, _travelling(size_bytes):
            return await asking.whole(first)
    except WrongPicture as error:
        raise NoAnswer("failed", str(error), error.trust_event) from None
    except trio.Cancelled:
        await asking.leave()
        raise


@contextmanager
def _travelling(n_bytes: int) -> Iterator[None]:
    """Slices that are so many bytes together. Raises NoAnswer where they take too long."""
    limit_s = TRAVEL_S + n_bytes / SLOWEST
    with trio.move_on_after(limit_s) as scope:
        yield
    if scope.cancelled_caught:
        raise NoAnswer("failed", f"{n_bytes} bytes took longer than {limit_s:.0f} s", TrustEvent.STALLED)


@dataclass(frozen=True, slots=True)
class _PictureExchange:
    router: Router
    node_id: NodeId
    question: PictureQuestion
    request_id: str
    heard: Callable[[], None]

    async def leave(self) -> None:
        """Also where this is cancelled: the holder's place is for others then."""
        with suppress(SwarmLLMError), trio.move_on_after(LEAVING_S) as scope:
            scope.shield = True
            await self.router.send(self.node_id, *encode_job(CancelInference(request_id=self.request_id)))

    async def brought(self) -> VisionEncodeResponse | None:
        """Send the picture; its first rows if they come with the last answer. Raises NoAnswer."""
        data, n_sent = self.question.picture.data, 0
        while n_sent < len(data):
            said = await self._say(data[n_sent : n_sent + IMAGE_MAX], offset=n_sent)
            if said.n_rows:
                return said
            n_received = said.n_received or 0
            if not n_sent < n_received <= len(data):
                raise NoAnswer("failed", "it takes no more of the picture", TrustEvent.BROKE_PROTOCOL)
            n_sent = n_received
        return None

    async def encoded(self) -> VisionEncodeResponse:
        """Its first rows. Raises NoAnswer."""
        until_s = trio.current_time() + ENCODING_S
        while trio.current_time() < until_s:
            began_s = trio.current_time()
            said = await self._say(b"")
            if said.n_rows:
                return said
            # It answers late by itself, unless it means to be asked without end.
            await trio.sleep_until(began_s + 0.5)
        raise NoAnswer("failed", f"it has not encoded the picture in {ENCODING_S:g} s", TrustEvent.STALLED)

    async def whole(self, first: VisionEncodeResponse) -> EncodedPicture:
        """Raises NoAnswer, WrongPicture."""
        question, manifest = self.question, self.question.entry.manifest
        parts, digest, said = first.parts or (), first.digest or b"", first
        row_bytes, rows = 4 * first.n_embd, bytearray()
        while True:
            if said.rows_as is not UNSET and not question.may_round:
                raise WrongPicture("it rounds rows that are to come as they are")
            n_left = first.n_rows - len(rows) // row_bytes
            if said.rows_as is UNSET:
                rows += rows_of(said, n_left)
            else:
                rows += await trio.to_thread.run_sync(rows_of, said, n_left)
            if len(rows) == first.n_rows * row_bytes:
                break
            said = await self._say(b"", first_row=len(rows) // row_bytes)
            if said.n_rows != first.n_rows:
                raise WrongPicture("it says two numbers of rows")
        encoded = await trio.to_thread.run_sync(
            lambda: assembled(
                question.entry.model_id,
                question.projector,
                Digest(question.picture.digest),
                parts,
                rows,
                digest,
                n_embd=manifest.n_embd_input,
                n_vocab=manifest.n_vocab,
            )
        )
        require_places(encoded, manifest.architecture)
        return replace(encoded, is_rounded=first.rows_as is not UNSET)

    async def _say(self, image: bytes, offset: int = 0, first_row: int = 0) -> VisionEncodeResponse:
        """Raises NoAnswer."""
        question = self.question
        request = VisionEncodeRequest(
            request_id=self.request_id,
            model_id=question.entry.model_id,
            image=memoryview(image),
            first_row=first_row,
            projector=question.projector,
            digest=Digest(question.picture.digest),
            size_bytes=len(question.picture.data),
            offset=offset,
            rows_as=HALF if question.may_round else UNSET,
        )
        timeout_s = SILENCE_S + (len(image) + IMAGE_MAX) / SLOWEST
        try:
            answer = await self.router.fetch(self.node_id, encode_request(request), timeout_s=timeout_s)
            said = decode_response(answer)
        except ProtocolError as error:
            raise NoAnswer(
                "failed", f"its answer cannot be read: {error}", TrustEvent.BROKE_PROTOCOL
            ) from None
        except NodeBusy as error:
            raise NoAnswer("busy", error.message) from None
        except NodeUnreachable as error:
            raise NoAnswer("failed", error.message, TrustEvent.LOST) from None
        except DeadlineExceeded as error:
            raise NoAnswer("failed", error.message, TrustEvent.STALLED) from None
        except SwarmLLMError as error:
            raise NoAnswer("failed", error.message, TrustEvent.FAILED) from None
        if not isinstance(said, VisionEncodeResponse) or said.request_id != self.request_id:
            raise NoAnswer("failed", "it answered something else", TrustEvent.BROKE_PROTOCOL)
        self.heard()
        return self._checked(said)

    def _checked(self, said: VisionEncodeResponse) -> VisionEncodeResponse:
        """Raises NoAnswer."""
        match said.error:
            case "Busy":
                raise NoAnswer("busy", "it is busy")
            case "BadImage":
                raise NoAnswer("bad picture", "it cannot decode it")
            case "EncoderDied":
                raise NoAnswer("died", "it ended its encoder")
            case "VisionEncoderUnavailable":
                raise NoAnswer("absent", "it has not the encoder that it announced")
        n_embd = self.question.entry.manifest.n_embd_input
        if said.n_rows and said.n_embd != n_embd:
            raise NoAnswer("failed", f"rows of {said.n_embd}, not {n_embd}", TrustEvent.BROKE_PROTOCOL)
        if 4 * said.n_rows * n_embd > PICTURE_ROWS_BYTES_MAX:
            raise NoAnswer("failed", f"{said.n_rows} rows are too many", TrustEvent.BROKE_PROTOCOL)
        return said
