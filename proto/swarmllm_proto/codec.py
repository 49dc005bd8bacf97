"""Messages to bytes and back. Decoders are built once, validate everything, and let only `ProtocolError` out.

msgspec reports faults as text with a JSON path; `field_and_reason` finds the field in it.
Encoding does not validate: what this node writes is checked by mypy here and by the reader there.

Of the swarm messages every reader ignores fields it does not know and refuses another `v`. A newer message
may differ in any field, so a message that fails validation is looked at once more for its version before its
field is blamed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, TypeVar

import msgspec
from blake3 import blake3

from swarmllm_proto.errors import BadMessage, DamagedJob, FrameTooLarge, UnsupportedVersion
from swarmllm_proto.file_digests import AnyRequest, AnyResponse
from swarmllm_proto.frames import Buffer, Frame, Payload, Pieces, as_pieces, encode_frame
from swarmllm_proto.identifiers import MEANINGS
from swarmllm_proto.ipc.messages import AnyDaemonMessage, AnyWorkerMessage, CallId, Scores, TokensAgain
from swarmllm_proto.limits import RECORD_MAX, REQUEST_MAX, SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX
from swarmllm_proto.swarm.messages import (
    DIGEST_SIZE,
    WIRE_VERSION,
    JobMessage,
    LayerForward,
    NodeRecord,
)

T = TypeVar("T")

NO_DIGEST: Final = bytes(DIGEST_SIZE)
"""What a job has for one before it is encoded; one that was made with it need not be copied for that."""
_PATH: Final = re.compile(r" - at (?:`([^`]*)` in )?`\$?\.?([^`]*)`$")
_NAMED: Final = re.compile(r"(?:Object missing required )?field `([^`]+)`")
_MEANINGS: Final = {f"matching regex {pattern!r}": meaning for pattern, meaning in MEANINGS.items()}
REASON_MAX: Final = 200


def field_and_reason(error: Exception, whole: str) -> tuple[str, str]:
    """The field that msgspec refused, from the path and from the field that the text of its error names;
    `whole` where all of it is unreadable. And the reason: msgspec quotes the pattern that a text does not
    match; people get what it should have been."""
    if isinstance(error, RecursionError):
        return whole, "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return whole, "contains text that is not UTF-8"
    text = str(error)
    path = _PATH.search(text)
    reason = text[: path.start()] if path else text
    reason = next((meaning for quoted, meaning in _MEANINGS.items() if quoted in reason), reason)
    named = _NAMED.match(reason)
    parts = [path.group(2) if path else "", named.group(1) if named else ""]
    return ".".join(part for part in parts if part) or whole, reason[:REASON_MAX]


class _Versioned(msgspec.Struct, frozen=True):
    v: int = WIRE_VERSION


class _Call(msgspec.Struct, frozen=True):
    id: CallId = 0


_SCORE_BYTES_MAX: Final = 1024 + 64
"""Of one TokenLogprob."""
_LENGTH: Final = Struct("<I")

_json: Final = msgspec.json.Encoder()
_daemon_messages: Final = msgspec.json.Decoder(AnyDaemonMessage)
_calls: Final = msgspec.json.Decoder(_Call)
_worker_messages: Final = msgspec.json.Decoder(AnyWorkerMessage)

_msgpack: Final = msgspec.msgpack.Encoder()
_jobs: Final = msgspec.msgpack.Decoder(JobMessage)
_records: Final = msgspec.msgpack.Decoder(NodeRecord)
_requests: Final = msgspec.msgpack.Decoder(AnyRequest)
_responses: Final = msgspec.msgpack.Decoder(AnyResponse)
_scores: Final = msgspec.msgpack.Decoder(Scores)
_again: Final = msgspec.msgpack.Decoder(TokensAgain)
_pieces = msgspec.msgpack.Decoder(tuple[bytes, ...])
_versions: Final = msgspec.msgpack.Decoder(_Versioned)

_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""What msgspec raises on bytes that are hostile rather than wrong: malformed, not UTF-8, nested without
end."""


def encode_ipc(message: AnyDaemonMessage | AnyWorkerMessage, payload: Payload = b"") -> Pieces:
    """One frame for the worker's socket, as pieces. Raises FrameTooLarge."""
    return encode_frame(_json.encode(message), payload)


def decode_daemon_message(frame: Frame) -> AnyDaemonMessage:
    """What the worker receives. Raises BadMessage; the payload is checked where it is decoded."""
    try:
        message: AnyDaemonMessage = _daemon_messages.decode(frame.header)
    except _UNREADABLE as error:
        raise _bad_message(error) from None
    return message


def call_id_of(frame: Frame) -> int:
    """The id of a daemon's message that is wrong elsewhere, so that its caller learns of it; 0 where even
    that is unreadable."""
    try:
        return _calls.decode(frame.header).id
    except _UNREADABLE:
        return 0


def decode_worker_message(frame: Frame) -> AnyWorkerMessage:
    """What the daemon receives. Raises BadMessage; the payload is checked where it is decoded."""
    try:
        message: AnyWorkerMessage = _worker_messages.decode(frame.header)
    except _UNREADABLE as error:
        raise _bad_message(error) from None
    return message


def encode_job(message: JobMessage, payload: Payload = b"") -> tuple[bytes, bytes | memoryview]:
    """Header and payload of one frame between nodes; a LayerForward gets its digest here (what it carried is
    ignored).

    Several pieces are joined (one copy); one buffer is passed through. Raises FrameTooLarge.
    """
    pieces = as_pieces(payload)
    body: bytes | memoryview = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if isinstance(message, LayerForward):
        if message.digest != NO_DIGEST:
            message = msgspec.structs.replace(message, digest=NO_DIGEST)
        unsigned = _msgpack.encode(message)[:-DIGEST_SIZE]
        header = unsigned + _digest(unsigned, body)
    else:
        header = _msgpack.encode(message)
    _check_size("header", len(header), SWARM_HEADER_MAX)
    _check_size("payload", len(body), SWARM_PAYLOAD_MAX)
    return header, body


def encode_job_frame(message: JobMessage, payload: bytes | memoryview = b"") -> bytes:
    """The frame that `encode_job` and `encode_frame` make, in one piece. Raises FrameTooLarge."""
    header = _msgpack.encode(message)
    tail = b""
    if isinstance(message, LayerForward):
        if message.digest != NO_DIGEST:
            header = _msgpack.encode(msgspec.structs.replace(message, digest=NO_DIGEST))
        header = header[:-DIGEST_SIZE]
        tail = _digest(header, payload)
    n_header, n_payload = len(header) + len(tail), len(payload)
    if n_header > SWARM_HEADER_MAX:
        _check_size("header", n_header, SWARM_HEADER_MAX)
    if n_payload > SWARM_PAYLOAD_MAX:
        _check_size("payload", n_payload, SWARM_PAYLOAD_MAX)
    return b"".join((_LENGTH.pack(n_header), header, tail, _LENGTH.pack(n_payload), payload))


def decode_job(header: bytes, payload: Buffer = b"") -> JobMessage:
    """Raises DamagedJob where a LayerForward's digest is wrong, UnsupportedVersion, BadMessage,
    FrameTooLarge."""
    if len(header) > SWARM_HEADER_MAX:
        _check_size("header", len(header), SWARM_HEADER_MAX)
    message: JobMessage = _decode(_jobs, header)
    if isinstance(message, LayerForward):
        # The digest must be the header's last bytes: that is what lets it be defined over bytes, not over a
        # re-encoding.
        if message.digest != header[-DIGEST_SIZE:]:
            raise BadMessage("digest", "must be the last field")
        if message.digest != _digest(memoryview(header)[:-DIGEST_SIZE], payload):
            raise DamagedJob(message.request_id, message.position)
    return message


def encode_pieces(pieces: Sequence[bytes]) -> bytes:
    return _msgpack.encode(pieces)


def decode_pieces(payload: Buffer, n: int) -> tuple[bytes, ...]:
    """Of so many tokens. Raises BadMessage."""
    try:
        pieces = _pieces.decode(payload)
    except _UNREADABLE as error:
        raise _bad_message(error) from None
    if len(pieces) != n:
        raise BadMessage("pieces", f"{len(pieces)} for {n} tokens")
    return pieces


def encode_scores(scores: Scores) -> bytes:
    return _msgpack.encode(scores)


def decode_scores(payload: Buffer, n_rows_max: int, n_top: int) -> Scores:
    """Of so many rows at most, each with the scored token and the `n_top` likeliest. Raises BadMessage."""
    n_each = 1 + n_top
    if len(payload) > _SCORE_BYTES_MAX * (1 + n_rows_max * n_each):
        raise BadMessage("scores", f"{len(payload)} bytes for {n_rows_max} rows")
    try:
        scores = _scores.decode(payload)
    except _UNREADABLE as error:
        raise _bad_message(error) from None
    if len(scores) > n_rows_max or any(len(row) != n_each for row in scores):
        raise BadMessage("scores", f"must be of {n_rows_max} rows at most, with {n_each} tokens each")
    return scores


def encode_again(tokens: TokensAgain) -> bytes:
    return _msgpack.encode(tokens)


def decode_again(payload: Buffer, n_rows: int) -> TokensAgain:
    """Of so many rows at most. Raises BadMessage."""
    if len(payload) > 32 * _SCORE_BYTES_MAX * (1 + n_rows):
        raise BadMessage("again", f"{len(payload)} bytes for {n_rows} rows")
    try:
        tokens = _again.decode(payload)
    except _UNREADABLE as error:
        raise _bad_message(error) from None
    if len(tokens) > n_rows:
        raise BadMessage("again", f"{len(tokens)} tokens for {n_rows} rows")
    return tokens


def encode_record(record: NodeRecord) -> bytes:
    """Raises FrameTooLarge."""
    return _encode_bounded("record", record, RECORD_MAX)


def decode_record(data: Buffer) -> NodeRecord:
    """Raises UnsupportedVersion, BadMessage, FrameTooLarge. Who wrote it is the caller's business to
    compare."""
    _check_size("record", len(data), RECORD_MAX)
    return _decode(_records, data)


def encode_request(request: AnyRequest) -> bytes:
    """Raises FrameTooLarge."""
    return _encode_bounded("request", request, REQUEST_MAX)


def decode_request(data: Buffer) -> AnyRequest:
    """Raises UnsupportedVersion, BadMessage, FrameTooLarge."""
    _check_size("request", len(data), REQUEST_MAX)
    request: AnyRequest = _decode(_requests, data)
    return request


def encode_response(response: AnyResponse) -> bytes:
    """Raises FrameTooLarge."""
    return _encode_bounded("response", response, REQUEST_MAX)


def decode_response(data: Buffer) -> AnyResponse:
    """Raises UnsupportedVersion, BadMessage, FrameTooLarge."""
    _check_size("response", len(data), REQUEST_MAX)
    response: AnyResponse = _decode(_responses, data)
    return response


def _decode(decoder: msgspec.msgpack.Decoder[T], data: Buffer) -> T:
    try:
        message = decoder.decode(data)
    except _UNREADABLE as error:
        _refuse_other_version(data)
        raise _bad_message(error) from None
    version: int = message.v  # type: ignore[attr-defined]
    if version != WIRE_VERSION:
        raise UnsupportedVersion(version, WIRE_VERSION)
    return message


def _refuse_other_version(data: Buffer) -> None:
    try:
        version = _versions.decode(data).v
    except _UNREADABLE:
        return
    if version != WIRE_VERSION:
        raise UnsupportedVersion(version, WIRE_VERSION)


def _digest(unsigned_header: Buffer, payload: Buffer) -> bytes:
    return blake3(unsigned_header).update(payload).digest()


def _encode_bounded(field: str, message: Any, maximum: int) -> bytes:
    data = _msgpack.encode(message)
    _check_size(field, len(data), maximum)
    return data


def _check_size(field: str, size: int, maximum: int) -> None:
    if size > maximum:
        raise FrameTooLarge(field, f"{size} bytes, at most {maximum}")


def _bad_message(error: Exception) -> BadMessage:
    return BadMessage(*field_and_reason(error, "message"))
