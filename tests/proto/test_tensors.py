from __future__ import annotations

from struct import pack
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.tensors import Tensor, decode_tensor, encode_tensor, tensor_bytes

arrays = hnp.arrays(
    dtype=st.sampled_from([np.float32, np.float16, np.int32]),
    shape=hnp.array_shapes(min_dims=1, max_dims=8, min_side=0, max_side=4),
)


@given(arrays)
def test_decoding_returns_what_was_encoded_bit_for_bit(array: Tensor) -> None:
    data = tensor_bytes(array)
    decoded = decode_tensor(data)
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()
    assert len(data) == 4 * (array.ndim + 2) + array.nbytes


@given(arrays, st.data())
def test_every_truncation_is_refused(array: Tensor, data: st.DataObject) -> None:
    encoded = tensor_bytes(array)
    n_bytes = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(BadTensor):
        decode_tensor(encoded[:n_bytes])


def test_contiguous_data_is_neither_copied_out_nor_in() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    _, data = encode_tensor(array)
    assert np.shares_memory(np.frombuffer(data, np.float32), array)
    received = bytearray(tensor_bytes(array))
    decoded = decode_tensor(received)
    assert np.shares_memory(decoded, np.frombuffer(received, np.uint8))


def test_strided_array_arrives_in_row_major_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.testing.assert_array_equal(decode_tensor(tensor_bytes(array.T)), array.T)
    np.testing.assert_array_equal(decode_tensor(tensor_bytes(array[:, ::2])), array[:, ::2])


def test_decoded_tensor_is_read_only_even_over_writable_memory() -> None:
    decoded = decode_tensor(bytearray(tensor_bytes(np.zeros((2, 2), np.float32))))
    with pytest.raises(ValueError, match="read-only"):
        decoded[0, 0] = 1


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "tensor.ndim"),
        (b"\x01\x00\x00", "tensor.ndim"),
        (pack("<I", 0), "tensor.ndim"),
        (pack("<I", 9), "tensor.ndim"),
        (pack("<I", 2**32 - 1), "tensor.ndim"),
        (pack("<2I", 2, 1), "tensor.shape"),
        (pack("<3I", 1, 0, 3), "tensor.dtype"),
        (pack("<3I", 1, 101, 0) + bytes(404), "tensor.shape"),
        (pack("<10I", 8, *[2**32 - 1] * 8, 0), "tensor.shape"),
        (pack("<5I", 3, 0, 2**32 - 1, 2**32 - 1, 0), "tensor.shape"),
        (pack("<4I", 2, 2, 2, 0) + bytes(15), "tensor.data"),
        (pack("<4I", 2, 2, 2, 0) + bytes(17), "tensor.data"),
    ],
)
def test_malformed_tensor_names_the_part(data: bytes, field: str) -> None:
    with pytest.raises(BadTensor) as caught:
        decode_tensor(data, max_elements=100)
    assert caught.value.field == field


def test_error_carries_the_callers_name_for_the_tensor() -> None:
    with pytest.raises(BadTensor) as caught:
        decode_tensor(b"", field="payload")
    assert caught.value.field == "payload.ndim"


@pytest.mark.parametrize(
    ("array", "field"),
    [
        (np.zeros(3, np.float64), "tensor.dtype"),
        (np.zeros(3, ">f4"), "tensor.dtype"),
        (np.array(["a"], object), "tensor.dtype"),
        (np.array(1.0, np.float32), "tensor.ndim"),
        (np.zeros((1,) * 9, np.float32), "tensor.ndim"),
    ],
)
def test_what_the_format_cannot_carry_is_refused_at_the_sender(
    array: np.ndarray[Any, Any], field: str
) -> None:
    with pytest.raises(BadTensor) as caught:
        encode_tensor(array)
    assert caught.value.field == field
