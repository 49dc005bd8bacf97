from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A

from swarmllm_proto import codec, ipc, limits, swarm
from swarmllm_proto.errors import BadMessage, DamagedJob, FrameTooLarge, ProtocolError, UnsupportedVersion
from swarmllm_proto.frames import Frame, encode_frame

MODEL_ID = "ab" * 32
FETCH_DIGESTS: dict[str, Any] = {"type": "FetchDigests", "header": MODEL_ID, "size_bytes": 9}
ASSIGNMENT: dict[str, Any] = {
    "type": "PipelineAssignment",
    "request_id": "r",
    "model_id": MODEL_ID,
    "origin": A,
    "stages": [{"node_id": A, "start": 0, "end": 4}],
    "n_prompt_tokens": 3,
    "sampling": {},
}
RECORD: dict[str, Any] = {"type": "NodeRecord", "node_id": A}
TOKEN: dict[str, Any] = {"type": "StreamingToken", "request_id": "r", "index": 0, "token": 1}
pack = msgspec.msgpack.encode


def frame(header: Any) -> Frame:
    return Frame(header if isinstance(header, bytes) else json.dumps(header).encode(), memoryview(b""))


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (b"", "message"),
        (b"{", "message"),
        (b"\xff", "message"),
        (b'{"type":"Load","id":1,"start":0,"end":1', "message"),
        (b'{"type":"Tokenize","id":1,"text":"\xff"}', "message"),
        (b'{"type":"Load","extra":' + b"[" * 100_000, "message"),
        ([], "message"),
        ({}, "type"),
        ({"type": "Nonsense", "id": 1}, "type"),
        ({"type": "Ready", "id": 1}, "type"),
        ({"type": "field `trust`", "id": 1}, "type"),
        ({"type": "DaemonMessage", "id": 1}, "type"),
        ({"type": 7, "id": 1}, "type"),
        ({"type": "Embed"}, "id"),
        ({"type": "Embed", "id": -1}, "id"),
        ({"type": "Embed", "id": "1"}, "id"),
        ({"type": "Embed", "id": 2**53 + 1}, "id"),
        ({"type": "Load", "id": 1, "start": 4, "end": 4}, "end"),
        ({"type": "Load", "id": 1, "start": 0, "end": 65536}, "end"),
        ({"type": "Unload", "id": 1, "start": 5, "end": 4}, "end"),
        ({"type": "Open", "id": 1, "path": "", "cache_dir": "c"}, "path"),
        ({"type": "Open", "id": 1, "path": "p", "cache_dir": "c", "n_ctx": 2**24 + 1}, "n_ctx"),
        ({"type": "Tokenize", "id": 1, "messages": [{"role": "user"}, 3]}, "messages[1]"),
        ({"type": "CancelRequest", "id": 1, "request_id": "x" * 65}, "request_id"),
        ({"type": "Generate", "id": 1, "request_id": "r", "sampling": {"top_p": 1.5}}, "sampling.top_p"),
        (
            {"type": "Generate", "id": 1, "request_id": "r", "sampling": {"stop": ["a", ""]}},
            "sampling.stop[1]",
        ),
        (
            {
                "type": "Forward",
                "id": 1,
                "request_id": "r",
                "start": 2,
                "end": 1,
                "position": 0,
                "want": "token",
            },
            "end",
        ),
        (
            {
                "type": "Forward",
                "id": 1,
                "request_id": "r",
                "start": 0,
                "end": 1,
                "position": 0,
                "want": "logits",
            },
            "want",
        ),
    ],
)
def test_daemon_message_that_is_wrong_names_the_field(header: Any, field: str) -> None:
    with pytest.raises(BadMessage) as caught:
        codec.decode_daemon_message(frame(header))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ({"type": "Load", "id": 1, "start": 0, "end": 4}, "type"),
        ({"type": "Loaded", "id": 1, "ranges": [[0, 4], [5]]}, "ranges[1]"),
        ({"type": "Token", "id": 1, "request_id": "r", "index": 0, "token": -1}, "token"),
        (
            {"type": "Token", "id": 1, "request_id": "r", "index": 0, "token": 1, "finish_reason": "x"},
            "finish_reason",
        ),
        ({"type": "Token", "request_id": "r", "index": 0, "token": 1, "stopped_by": -1}, "stopped_by"),
        ({"type": "LayerResult", "id": 1, "compute_s": -0.5}, "compute_s"),
        ({"type": "LayerResult", "id": 1, "compute_s": 1e300}, "compute_s"),
        ({"type": "Error", "id": 1, "kind": "surprise", "message": "m"}, "kind"),
    ],
)
def test_worker_message_that_is_wrong_names_the_field(header: Any, field: str) -> None:
    with pytest.raises(BadMessage) as caught:
        codec.decode_worker_message(frame(header))
    assert caught.value.field == field


Decode = Callable[[bytes], object]


@pytest.mark.parametrize(
    ("decode", "body", "field"),
    [
        (codec.decode_record, b"\xc1", "message"),
        (codec.decode_record, pack(RECORD) + b"\x00", "message"),
        (codec.decode_record, pack({**RECORD, "type": "PipelineAck"}), "type"),
        (codec.decode_record, pack({**RECORD, "node_id": ""}), "node_id"),
        (codec.decode_record, pack({**RECORD, "started_at": float("inf")}), "started_at"),
        (codec.decode_record, pack({**RECORD, "started_at": float("nan")}), "started_at"),
        (codec.decode_record, pack({**RECORD, "nickname": "x" * 201}), "nickname"),
        (
            codec.decode_record,
            pack(
                {**RECORD, "models": [{"model_id": MODEL_ID, "name": "m", "n_layers": 4, "ranges": [[0, 5]]}]}
            ),
            "models[0].ranges",
        ),
        (
            codec.decode_record,
            pack(
                {
                    **RECORD,
                    "models": [
                        {"model_id": f"{n:064x}", "name": "m", "n_layers": 4, "ranges": [[0, 1]] * 9}
                        for n in range(228)
                    ],
                }
            ),
            "models",
        ),
        (
            codec.decode_record,
            pack({**RECORD, "models": [{"model_id": "AB" * 32, "name": "m", "n_layers": 4, "ranges": []}]}),
            "models[0].model_id",
        ),
        (codec.decode_request, pack({**ASSIGNMENT, "stages": []}), "stages"),
        (
            codec.decode_request,
            pack({**ASSIGNMENT, "stages": [{"node_id": A, "start": 0}]}),
            "stages[0].end",
        ),
        (
            codec.decode_request,
            pack({**ASSIGNMENT, "stages": [{"node_id": A, "start": 3, "end": 3}]}),
            "stages[0].end",
        ),
        (
            codec.decode_request,
            pack({**ASSIGNMENT, "stages": [{"node_id": A, "start": 1, "end": 3}]}),
            "stages[0].start",
        ),
        (
            codec.decode_request,
            pack({**ASSIGNMENT, "stages": [{"node_id": A, "start": s, "end": s + 2} for s in (0, 3)]}),
            "stages[1].start",
        ),
        (codec.decode_request, pack({**FETCH_DIGESTS, "header": "AB" * 32}), "header"),
        (codec.decode_request, pack({**FETCH_DIGESTS, "sha256": ""}), "sha256"),
        (codec.decode_request, pack({**FETCH_DIGESTS, "known": [[0, bytes(33)]]}), "known[0].digests"),
        (codec.decode_request, pack({**FETCH_DIGESTS, "known": [[65_535, bytes(64)]]}), "known[0].digests"),
        (codec.decode_request, pack({**FETCH_DIGESTS, "known": [[65_536, bytes(32)]]}), "known[0][0]"),
        (codec.decode_response, pack({"type": "Digests", "status": "some"}), "status"),
        (codec.decode_response, pack({"type": "PipelineAck", "request_id": "r", "accepted": 1}), "accepted"),
        (codec.decode_job, pack({**TOKEN, "token": 2**31}), "token"),
        (codec.decode_job, pack({**TOKEN, "stopped_by": 16}), "stopped_by"),
        (codec.decode_job, pack({**TOKEN, "stopped_by": "END"}), "stopped_by"),
        (codec.decode_job, pack({**TOKEN, "timings": [[0, 0.5]]}), "timings[0]"),
        (codec.decode_job, pack({**TOKEN, "timings": [[0, 0.5, -1.0]]}), "timings[0][2]"),
        (codec.decode_job, pack({**TOKEN, "type": "PipelineAck"}), "type"),
    ],
)
def test_swarm_message_that_is_wrong_names_the_field(decode: Decode, body: bytes, field: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("decode", "message"),
    [(codec.decode_record, RECORD), (codec.decode_request, ASSIGNMENT), (codec.decode_job, TOKEN)],
)
def test_unknown_fields_are_ignored_and_other_versions_refused(
    decode: Decode, message: dict[str, Any]
) -> None:
    assert decode(pack({**message, "from_the_future": [1, {"a": None}]})) == decode(pack(message))
    with pytest.raises(UnsupportedVersion) as caught:
        decode(pack({**message, "v": 2}))
    assert caught.value.version == 2


def test_a_node_that_says_nothing_of_stop_strings_is_understood_and_understands() -> None:
    """The field came after the first version."""
    told = codec.decode_job(pack(TOKEN))
    assert isinstance(told, swarm.StreamingToken)
    assert told.stopped_by is None
    header, _ = codec.encode_job(msgspec.structs.replace(told, finish_reason="stop", stopped_by=3))
    earlier = msgspec.defstruct(
        "StreamingToken",
        [
            (f.name, f.type)
            for f in msgspec.structs.fields(told)
            if f.name in TOKEN or f.name == "finish_reason"
        ],
        tag=True,
    )
    assert msgspec.structs.asdict(msgspec.msgpack.decode(header, type=earlier))["finish_reason"] == "stop"


def test_message_of_another_version_is_not_blamed_for_its_fields() -> None:
    with pytest.raises(UnsupportedVersion):
        codec.decode_record(pack({"type": "SomethingNew", "v": 9, "node_id": 7}))


def layer_forward(**changes: Any) -> swarm.LayerForward:
    fields = {"request_id": "r", "step": "layer", "stage": 1, "position": 5, "n_tokens": 1}
    return swarm.LayerForward(**{**fields, **changes})


@given(payload=st.binary(max_size=64), data=st.data())
def test_no_flipped_bit_of_a_job_goes_unnoticed(payload: bytes, data: st.DataObject) -> None:
    header, body = codec.encode_job(layer_forward(), payload)
    arrived = bytearray(header + bytes(body))
    bit = data.draw(st.integers(0, 8 * len(arrived) - 1))
    arrived[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        codec.decode_job(bytes(arrived[: len(header)]), memoryview(arrived)[len(header) :])


def test_damaged_payload_tells_which_step_to_repeat() -> None:
    header, _ = codec.encode_job(layer_forward(request_id="abc", position=77), b"payload")
    with pytest.raises(DamagedJob) as caught:
        codec.decode_job(header, b"paYload")
    assert (caught.value.request_id, caught.value.position) == ("abc", 77)


def test_digest_of_a_job_from_a_newer_node_covers_the_fields_we_do_not_know() -> None:
    fields = {**msgspec.to_builtins(layer_forward()), "type": "LayerForward", "hint": 3}
    del fields["digest"]
    unsigned = pack({**fields, "digest": bytes(32)})[:-32]
    header = unsigned + blake3(unsigned + b"payload").digest()
    message = codec.decode_job(header, b"payload")
    assert isinstance(message, swarm.LayerForward)
    with pytest.raises(DamagedJob):
        codec.decode_job(header.replace(b"hint\x03", b"hint\x04"), b"payload")


def test_digest_must_end_the_header() -> None:
    header, _ = codec.encode_job(layer_forward())
    fields = msgspec.msgpack.decode(header)
    digest_first = {"type": fields.pop("type"), "digest": fields.pop("digest"), **fields}
    with pytest.raises(BadMessage) as caught:
        codec.decode_job(pack(digest_first))
    assert caught.value.field == "digest"
    assert not isinstance(caught.value, DamagedJob)


def test_job_payload_in_one_buffer_is_passed_through() -> None:
    payload = memoryview(bytearray(1000))
    _, body = codec.encode_job(layer_forward(), payload)
    assert body is payload
    _, joined = codec.encode_job(layer_forward(), [b"ab", payload[:2]])
    assert joined == b"ab\0\0"


@pytest.mark.parametrize("payload", [b"", bytes(range(100))])
@pytest.mark.parametrize("digest", [b"", codec.NO_DIGEST, bytes(range(32))])
def test_a_job_in_one_piece_is_the_frame_of_its_parts(payload: bytes, digest: bytes) -> None:
    token = swarm.StreamingToken(request_id="r", index=1, token=2)
    for message in (msgspec.structs.replace(layer_forward(), digest=digest), token):
        parts = encode_frame(
            *codec.encode_job(message, payload),
            header_max=limits.SWARM_HEADER_MAX,
            payload_max=limits.SWARM_PAYLOAD_MAX,
        )
        assert codec.encode_job_frame(message, payload) == b"".join(parts)
    with pytest.raises(FrameTooLarge, match="payload"):
        codec.encode_job_frame(token, memoryview(np.empty(limits.SWARM_PAYLOAD_MAX + 1, np.uint8)))


def test_bytes_of_a_model_are_not_copied_out_of_the_answer_that_brought_them() -> None:
    piece = swarm.Piece(status="ok", data=memoryview(bytes(range(256))))
    answer = memoryview(bytearray(codec.encode_response(piece)))
    decoded = codec.decode_response(answer)
    assert isinstance(decoded, swarm.Piece)
    assert decoded == piece
    assert decoded.data.obj is answer.obj


def test_senders_and_readers_share_the_size_limits() -> None:
    announce = swarm.ShardAnnounce(
        model_id=MODEL_ID, name="\N{GRINNING FACE}" * 200, n_layers=9, ranges=((0, 1),) * 8
    )
    file = swarm.FileAnnounce(model_id=MODEL_ID, name=announce.name, n_layers=9)
    record = swarm.NodeRecord(node_id=A, models=(announce,) * 256, files=(file,) * 256)
    with pytest.raises(FrameTooLarge, match="record"):
        codec.encode_record(record)
    with pytest.raises(FrameTooLarge, match="record"):
        codec.decode_record(bytes(limits.RECORD_MAX + 1))
    with pytest.raises(FrameTooLarge, match="request"):
        codec.decode_request(bytes(limits.REQUEST_MAX + 1))
    with pytest.raises(FrameTooLarge, match="response"):
        codec.decode_response(bytes(limits.REQUEST_MAX + 1))
    with pytest.raises(FrameTooLarge, match="header"):
        codec.decode_job(bytes(limits.SWARM_HEADER_MAX + 1))


def test_errors_stay_short_whatever_the_sender_wrote() -> None:
    with pytest.raises(BadMessage) as caught:
        codec.decode_daemon_message(frame({"type": "x" * 100_000, "id": 1}))
    assert len(str(caught.value)) < 500


@given(
    st.builds(
        ipc.Sampling,
        max_tokens=st.integers(1, 2**20),
        temperature=st.floats(0, 100),
        top_k=st.integers(0, 2**20),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        repeat_penalty=st.floats(0, 10),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        seed=st.none() | st.integers(0, 2**32 - 1),
        stop=st.lists(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256), max_size=16
        ).map(tuple),
        ignore_eos=st.booleans(),
    )
)
def test_sampling_means_the_same_on_both_wires(sampling: ipc.Sampling) -> None:
    generate = ipc.Generate(id=1, request_id="r", sampling=sampling)
    head, *_ = codec.encode_ipc(generate)
    assert codec.decode_daemon_message(frame(bytes(head)[4:-4])) == generate
    assignment = swarm.PipelineAssignment(
        request_id="r",
        model_id=MODEL_ID,
        origin=A,
        stages=(swarm.Stage(node_id=A, start=0, end=4),),
        n_prompt_tokens=3,
        sampling=sampling,
    )
    assert codec.decode_request(codec.encode_request(assignment)) == assignment
