from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.limits import PACKED_ROWS_MAX
from swarmllm_proto.tensors import (
    BLOCK_BYTES,
    HEAD,
    LOSSLESS_TAG,
    Q8_0_TAG,
    ROW_FORMATS,
    Tensor,
    decode_tensor,
    is_packed,
    pack_rows,
    rounded,
    tensor_bytes,
    unpack_rows,
)

WIDTH = 64
any_bits = hnp.arrays(np.uint32, (2, WIDTH)).map(lambda bits: bits.view(np.float32))
"""NaN, infinities and subnormal numbers among them."""
finite = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.sampled_from([32, WIDTH, 96])),
    elements=st.floats(-1e6, 1e6, width=32),
)


def unpacked(data: bytes, rows: Tensor) -> Tensor:
    return unpack_rows(data, n_rows=rows.shape[0], width=rows.shape[1])


@given(any_bits | finite, st.sampled_from(ROW_FORMATS))
def test_no_format_changes_a_bit_of_what_it_is_given(rows: Tensor, row_format: str) -> None:
    data = pack_rows(rows, row_format)  # type: ignore[arg-type]
    assert len(data) <= len(tensor_bytes(rows))
    assert unpacked(data, rows).tobytes() == rows.tobytes()


@given(finite)
def test_rounded_rows_are_packed_into_blocks_and_rounding_is_done_once(rows: Tensor) -> None:
    once = rounded(rows)
    assert rounded(once).tobytes() == once.tobytes()
    data = pack_rows(once, "q8_0")
    assert HEAD.unpack_from(data) == (2, *rows.shape, Q8_0_TAG)
    assert len(data) == HEAD.size + rows.size // 32 * BLOCK_BYTES
    assert unpacked(data, rows).tobytes() == once.tobytes()


@given(finite)
def test_rounding_moves_no_value_by_more_than_half_a_step(rows: Tensor) -> None:
    largest = np.abs(rows.astype(np.float64)).reshape(-1, 32).max(axis=1).repeat(32).reshape(rows.shape)
    # And the scale is an f16: 11 bits, 24 behind the point at most.
    allowed = largest / 127 * 0.5 + np.maximum(largest * 2.0**-11, 127 * 2.0**-25)
    assert (np.abs(rounded(rows) - rows.astype(np.float64)) <= allowed * 1.0001).all()


def test_rows_are_rounded_as_the_specification_says() -> None:
    rows = np.zeros((1, 32), np.float32)
    rows[0, :5] = 254, 1, 3, -1, 2.9
    # A step is 2: 1 and 3 are ties, and go to the even codes 0 and 2.
    assert rounded(rows)[0, :5].tolist() == [254, 0, 4, 0, 2]
    assert HEAD.unpack_from(pack_rows(rounded(rows), "q8_0"))[3] == Q8_0_TAG


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 127 * 65536.0])
def test_rows_that_no_scale_can_hold_stay_as_they_are(value: float) -> None:
    rows = np.ones((2, 32), np.float32)
    rows[1, 7] = value
    assert rounded(rows) is rows
    assert unpacked(pack_rows(rows, "q8_0"), rows).tobytes() == rows.tobytes()
    assert HEAD.unpack_from(pack_rows(rows, "q8_0"))[3] != Q8_0_TAG


def test_rows_of_no_whole_blocks_are_not_rounded() -> None:
    rows = np.full((2, 33), 0.3, np.float32)
    assert rounded(rows) is rows
    assert HEAD.unpack_from(pack_rows(rows, "q8_0"))[3] == LOSSLESS_TAG


def test_formats_save_what_they_promise() -> None:
    rows = np.random.default_rng(1).standard_normal((128, 896)).astype(np.float32)
    plain = len(tensor_bytes(rows))
    assert plain / len(pack_rows(rounded(rows), "q8_0")) > 3.76
    assert plain / len(pack_rows(rows, "lossless")) > 1.1
    # Where zstd saves nothing there is no frame of it.
    noise = np.random.default_rng(1).integers(0, 2**32, (4, 64), np.uint64).astype(np.uint32).view(np.float32)
    assert not is_packed(pack_rows(noise, "lossless"))


def test_large_tensors_are_sent_as_they_are() -> None:
    rows = np.zeros((PACKED_ROWS_MAX // 4 // 32 + 1, 32), np.float32)
    assert not is_packed(pack_rows(rows, "lossless"))
    assert is_packed(pack_rows(rows[:-1], "lossless"))


ROWS = np.random.default_rng(2).standard_normal((3, WIDTH)).astype(np.float16).astype(np.float32)
Q8_0 = pack_rows(rounded(ROWS), "q8_0")
LOSSLESS = pack_rows(ROWS, "lossless")
assert is_packed(LOSSLESS)
PLANES = HEAD.pack(2, 3, WIDTH, LOSSLESS_TAG)


def compressed(data: bytes, *, says_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=says_size).compress(data)


def renamed(frame: bytes, n_bytes: int) -> bytes:
    """A zstd frame that says another content size than it has."""
    view = bytearray(frame)
    size_at = 5 if view[4] & 0x20 else 6
    n_size = (1, 2, 4, 8)[view[4] >> 6]
    said = n_bytes - 256 if n_size == 2 else n_bytes
    view[size_at : size_at + n_size] = said.to_bytes(n_size, "little")
    return bytes(view)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (HEAD.pack(2, 4, WIDTH, Q8_0_TAG) + Q8_0[HEAD.size :], "rows.shape"),
        (HEAD.pack(2, 3, WIDTH - 1, Q8_0_TAG), "rows.shape"),
        (HEAD.pack(1, 3, WIDTH, Q8_0_TAG), "rows.shape"),
        (HEAD.pack(2, 2**32 - 1, 2**32 - 1, LOSSLESS_TAG), "rows.shape"),
        (Q8_0[:-1], "rows.data"),
        (Q8_0 + b"\0", "rows.data"),
        (Q8_0[: HEAD.size] + b"\x00\x7c" + Q8_0[HEAD.size + 2 :], "rows.scale"),
        (Q8_0[: HEAD.size] + b"\x01\x7e" + Q8_0[HEAD.size + 2 :], "rows.scale"),
        (Q8_0[: HEAD.size] + b"\x00\xfc" + Q8_0[HEAD.size + 2 :], "rows.scale"),
        (LOSSLESS[:-1], "rows.data"),
        (LOSSLESS + b"\0", "rows.data"),
        (PLANES, "rows.data"),
        (PLANES + b"nothing of zstd's", "rows.data"),
        # One that says that it is larger, one that does not say, and two that lie.
        (PLANES + compressed(bytes(2**28)), "rows.data"),
        (PLANES + compressed(bytes(ROWS.nbytes), says_size=False), "rows.data"),
        (PLANES + renamed(compressed(bytes(2**26)), ROWS.nbytes), "rows.data"),
        (PLANES + renamed(compressed(bytes(300)), ROWS.nbytes), "rows.data"),
        (HEAD.pack(2, 3, WIDTH, 5) + bytes(64), "rows.dtype"),
    ],
)
def test_hostile_rows_are_refused_with_their_field(data: bytes, field: str) -> None:
    with pytest.raises(BadTensor) as refusal:
        unpack_rows(data, n_rows=3, width=WIDTH, field="rows")
    assert refusal.value.field == field


def test_more_rows_than_may_come_packed_are_refused_before_they_are_unpacked() -> None:
    n_rows = PACKED_ROWS_MAX // (4 * WIDTH) + 1
    head = HEAD.pack(2, n_rows, WIDTH, LOSSLESS_TAG)
    with pytest.raises(BadTensor) as refusal:
        unpack_rows(head + compressed(bytes(4 * n_rows * WIDTH)), n_rows=n_rows, width=WIDTH)
    assert refusal.value.field == "tensor.shape"


def test_rows_of_other_tensors_are_never_packed() -> None:
    for data in (Q8_0, LOSSLESS):
        with pytest.raises(BadTensor) as refusal:
            decode_tensor(data)
        assert refusal.value.field == "tensor.dtype"


@given(st.binary(max_size=200), st.sampled_from([Q8_0[:16], LOSSLESS[:16], b""]))
def test_nothing_but_bad_tensor_comes_of_bytes(data: bytes, head: bytes) -> None:
    try:
        rows = unpack_rows(head + data, n_rows=3, width=WIDTH)
    except BadTensor:
        return
    assert rows.nbytes <= max(len(data), ROWS.nbytes)


@given(st.integers(0, len(LOSSLESS) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_rows_of_the_same_shape_or_a_refusal(at: int, flip: int) -> None:
    damaged = bytearray(LOSSLESS)
    damaged[at] ^= flip
    try:
        rows = unpack_rows(bytes(damaged), n_rows=3, width=WIDTH)
    except BadTensor:
        return
    assert rows.size <= ROWS.size


def test_unpacked_rows_are_read_only() -> None:
    for data in (Q8_0, LOSSLESS):
        with pytest.raises(ValueError, match="read-only"):
            unpacked(data, ROWS)[0, 0] = 1
