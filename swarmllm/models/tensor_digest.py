"""The digest of a tensor, of which each MiB can be checked on its own.

A tensor of up to one MiB has the BLAKE3 of its bytes. The digest of a larger one is the BLAKE3 of its *chunk
list*: the BLAKE3 of each of its MiB, in order, 32 bytes each. So whoever has the list, which the digest
proves, knows of every MiB that arrives whether it is right before writing it, and who sent it if it is
not. Which of the two a digest is follows from the tensor's size, and that from its shape and type, which
the ModelId covers.

BLAKE3 is a tree itself, but the library does not show the inner nodes.
"""

from __future__ import annotations

from blake3 import blake3

from swarmllm_proto.limits import PIECE_MAX

CHUNK_BYTES = PIECE_MAX
"""So that every piece that travels is one chunk."""
DIGEST_BYTES = 32


class TensorHasher:
    """Front to back, in portions of any size."""

    def __init__(self) -> None:
        self._chunks = bytearray()
        self._hasher = blake3()
        self._n_bytes = 0
        """Of the chunk that is not complete yet."""

    def update(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            part = left[: CHUNK_BYTES - self._n_bytes]
            self._hasher.update(part)
            self._n_bytes += len(part)
            left = left[len(part) :]
            if self._n_bytes == CHUNK_BYTES:
                self._chunks += self._hasher.digest()
                self._hasher, self._n_bytes = blake3(), 0

    def chunk_list(self) -> bytes:
        """Of what has been seen so far."""
        if self._n_bytes or not self._chunks:
            return bytes(self._chunks) + self._hasher.digest()
        return bytes(self._chunks)

    def hexdigest(self) -> str:
        return digest_of(self.chunk_list())


def chunk_digest(data: bytes | memoryview) -> bytes:
    """The entry of one chunk in the chunk list."""
    return blake3(data).digest()


def digest_of(chunk_list: bytes) -> str:
    """The digest, as 64 hexadecimal digits, of the tensor that has this chunk list."""
    return chunk_list.hex() if len(chunk_list) == DIGEST_BYTES else blake3(chunk_list).hexdigest()


def chunk_list_bytes(size_bytes: int) -> int:
    """How long the chunk list of a tensor is."""
    return max(1, -(-size_bytes // CHUNK_BYTES)) * DIGEST_BYTES


def is_chunk(chunk_list: bytes, offset: int, data: bytes | memoryview) -> bool:
    """Whether `data` are the chunk that begins at `offset` of the tensor."""
    index, rest = divmod(offset, CHUNK_BYTES)
    expected = chunk_list[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
    return not rest and chunk_digest(data) == expected
