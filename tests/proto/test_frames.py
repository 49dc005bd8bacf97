"""The decoder's promise: the same frames and the same error, however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.errors import FrameTooLarge, FrameTruncated, ProtocolError
from swarmllm_proto.frames import Buffer, Frame, FrameDecoder, encode_frame
from swarmllm_proto.tensors import encode_tensor

HEADER_MAX = 50
PAYLOAD_MAX = 100
Events = tuple[list[tuple[bytes, bytes]], tuple[type[ProtocolError], str] | None]


def drive(chunks: list[Buffer], *, use_room: bool = False, owned: bool = False) -> Events:
    """Everything a connection that delivers these chunks and ends would be told."""
    decoder = FrameDecoder(HEADER_MAX, PAYLOAD_MAX)
    frames: list[Frame] = []
    try:
        for chunk in chunks:
            room = decoder.room(len(chunk)) if use_room else None
            if owned:
                frames += decoder.feed_owned(bytes(chunk))
            elif room is None:
                frames += decoder.feed(chunk)
            else:
                room[:] = chunk
                frames += decoder.filled(len(chunk))
        decoder.eof()
    except ProtocolError as error:
        return [(f.header, bytes(f.payload)) for f in frames], (type(error), str(error))
    return [(f.header, bytes(f.payload)) for f in frames], None


def cut(data: bytes, at: list[int]) -> list[Buffer]:
    edges = [0, *sorted(at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def wire(*frames: tuple[bytes, bytes]) -> bytes:
    return b"".join(b"".join(encode_frame(header, payload)) for header, payload in frames)


frame_lists = st.lists(st.tuples(st.binary(max_size=HEADER_MAX), st.binary(max_size=PAYLOAD_MAX)), max_size=5)
endings = st.sampled_from(
    [
        b"",
        b"\x01",
        b"\x02\x00\x00\x00a",
        pack("<I", HEADER_MAX + 1),
        b"\x00\x00\x00\x00\xff\xff\xff\xff",
        wire((b"h", b"pay"))[:-1],
    ]
)


@given(frames=frame_lists, ending=endings, data=st.data())
def test_any_cut_gives_the_same_frames_and_the_same_error(
    frames: list[tuple[bytes, bytes]], ending: bytes, data: st.DataObject
) -> None:
    stream = wire(*frames) + ending
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    whole = drive([stream])
    assert whole[0] == frames
    assert (whole[1] is None) == (ending == b"")
    assert drive(cut(stream, cuts)) == whole
    assert drive([stream[i : i + 1] for i in range(len(stream))]) == whole
    assert drive(cut(stream, cuts), use_room=True) == whole
    assert drive(cut(stream, cuts), owned=True) == whole
    one_each = [wire(frame) for frame in frames]
    assert drive([*one_each, ending], owned=True) == whole
    assert drive([stream[i : i + 1] for i in range(len(stream))], use_room=True) == whole


def test_there_is_room_for_what_belongs_to_the_payload_in_progress_and_nothing_else() -> None:
    decoder = FrameDecoder(HEADER_MAX, PAYLOAD_MAX)
    assert decoder.room(1) is None
    decoder.feed(wire((b"h", b"pay"))[:-3])
    assert decoder.room(0) is decoder.room(4) is None
    room = decoder.room(3)
    assert room is not None
    room[:] = b"pay"
    (frame,) = decoder.filled(3)
    assert (frame.header, frame.payload) == (b"h", b"pay")
    assert frame.payload.obj is room.obj
    assert decoder.room(1) is None


@pytest.mark.parametrize(
    ("stream", "field"),
    [
        (pack("<I", HEADER_MAX + 1), "header"),
        (pack("<I", 2**32 - 1), "header"),
        (pack("<I", 1) + b"h" + pack("<I", PAYLOAD_MAX + 1), "payload"),
    ],
)
def test_oversized_length_is_refused_with_its_field_before_its_bytes_come(stream: bytes, field: str) -> None:
    decoder = FrameDecoder(HEADER_MAX, PAYLOAD_MAX)
    with pytest.raises(FrameTooLarge) as caught:
        decoder.feed(stream)
    assert caught.value.field == field
    with pytest.raises(FrameTooLarge):
        decoder.feed(wire((b"good", b"")))
    with pytest.raises(FrameTooLarge):
        decoder.eof()


def test_frames_before_an_error_are_delivered_first() -> None:
    decoder = FrameDecoder(HEADER_MAX, PAYLOAD_MAX)
    frames = decoder.feed(wire((b"good", b"p")) + b"\xff\xff\xff\xff")
    assert [frame.header for frame in frames] == [b"good"]
    with pytest.raises(FrameTooLarge):
        decoder.feed(b"")


@pytest.mark.parametrize(
    ("n_bytes", "field"),
    [
        (1, "header_length"),
        (4, "header"),
        (7, "header"),
        (8, "payload_length"),
        (12, "payload"),
        (14, "payload"),
    ],
)
def test_end_inside_a_frame_names_the_incomplete_part(n_bytes: int, field: str) -> None:
    decoder = FrameDecoder()
    assert decoder.feed(wire((b"head", b"pay"))[:n_bytes]) == []
    assert decoder.inside_frame
    with pytest.raises(FrameTruncated) as caught:
        decoder.eof()
    assert caught.value.field == field


def test_end_between_frames_is_clean() -> None:
    decoder = FrameDecoder()
    assert len(decoder.feed(wire((b"h", b""), (b"", b"p")))) == 2
    assert not decoder.inside_frame
    decoder.eof()


def test_frame_survives_reuse_of_the_receive_buffer() -> None:
    buffer = bytearray(wire((b"head", b"payload")))
    [frame] = FrameDecoder().feed(buffer)
    buffer[:] = bytes(len(buffer))
    assert frame.header == b"head"
    assert bytes(frame.payload) == b"payload"


def test_payload_is_aligned_for_simd_wherever_it_was_received() -> None:
    stream = wire((b"odd", bytes(1000)), (b"header", bytes(3000)))
    for frame in FrameDecoder().feed(stream):
        assert np.frombuffer(frame.payload, np.uint8).ctypes.data % 16 == 0


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_announced_length_costs_no_memory_until_bytes_arrive() -> None:
    before = resident_pages()
    decoder = FrameDecoder()
    decoder.feed(pack("<I", 0) + pack("<I", 512 * 2**20) + b"only these")
    assert decoder.inside_frame
    assert (resident_pages() - before) * 4096 < 16 * 2**20


def test_encoding_references_the_payload_instead_of_copying_it() -> None:
    tensor = np.arange(6, dtype=np.float32)
    head, piece = encode_frame(b"h", tensor.data)
    assert np.shares_memory(np.frombuffer(piece, np.float32), tensor)
    [frame] = FrameDecoder().feed(bytes(head) + bytes(piece))
    assert bytes(frame.payload) == tensor.tobytes()


def test_payload_may_come_in_pieces_of_which_some_are_empty() -> None:
    pieces = encode_frame(b"h", [b"ab", b"", memoryview(b"cd")])
    assert b"".join(pieces) == wire((b"h", b"abcd"))


@pytest.mark.parametrize(
    ("header", "payload", "field"), [(b"abcd", b"", "header"), (b"a", b"abcd", "payload")]
)
def test_sender_is_told_what_the_receiver_would_refuse(header: bytes, payload: bytes, field: str) -> None:
    with pytest.raises(FrameTooLarge) as caught:
        encode_frame(header, payload, header_max=3, payload_max=3)
    assert caught.value.field == field


def test_the_payload_that_the_limit_names_can_be_sent() -> None:
    encode_frame(b"{}", encode_tensor(np.empty((16384, 8192), np.float32)))
