"""The digest of a tensor does not depend on how its bytes arrive, and proves each MiB of it."""

from __future__ import annotations

import random

from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.models.hashing import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    TensorHasher,
    chunk_list_bytes,
    digest_of,
    is_chunk,
)

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 77]


def by_hand(data: bytes) -> str:
    if len(data) <= CHUNK_BYTES:
        return blake3(data).hexdigest()
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return blake3(b"".join(blake3(chunk).digest() for chunk in chunks)).hexdigest()


@settings(max_examples=40)
@given(
    size=st.sampled_from(SIZES),
    cuts=st.lists(st.integers(0, max(SIZES)), max_size=6).map(sorted),
    seed=st.integers(0, 9),
)
def test_any_portions_give_the_digest_of_the_document(size: int, cuts: list[int], seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    hasher = TensorHasher()
    for start, end in zip([0, *cuts], [*cuts, size], strict=True):
        hasher.update(data[start:end])
    assert hasher.hexdigest() == by_hand(data)
    assert len(hasher.chunk_list()) == chunk_list_bytes(size)
    assert digest_of(hasher.chunk_list()) == by_hand(data)


def test_each_chunk_is_told_from_any_other_bytes() -> None:
    data = random.Random(1).randbytes(2 * CHUNK_BYTES + 100)
    hasher = TensorHasher()
    hasher.update(data)
    chunk_list = hasher.chunk_list()
    assert len(chunk_list) == 3 * DIGEST_BYTES
    for at in range(0, len(data), CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        assert is_chunk(chunk_list, at, chunk)
        assert not is_chunk(chunk_list, at, chunk[:-1])
        assert not is_chunk(chunk_list, at, chunk[:-1] + bytes([chunk[-1] ^ 1]))
    assert not is_chunk(chunk_list, CHUNK_BYTES, data[:CHUNK_BYTES])
    assert not is_chunk(chunk_list, 1, data[1 : CHUNK_BYTES + 1])
    assert not is_chunk(chunk_list, 3 * CHUNK_BYTES, b"")
