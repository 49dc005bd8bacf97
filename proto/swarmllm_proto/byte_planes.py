"""Packs numbers as byte planes in a zstd frame: the first bytes of all values, then the second ones ...

Signs and exponents of neighbours are alike, so their plane becomes small.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from swarmllm_proto.errors import BadTensor
from swarmllm_proto.frames import Buffer

Values = npt.NDArray[Any]
_LEVEL: Final = 1
_compressors: list[Any] = []
"""Those that no thread uses at the moment."""


def pack_planes(values: Values) -> bytes:
    """Of an array of any shape."""
    # Only who packs pays for the import; no two threads may use one of zstd's contexts at the same time.
    import zstandard

    planes = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, values.itemsize).T
    try:
        compressor = _compressors.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    packed: bytes = compressor.compress(planes.tobytes())
    _compressors.append(compressor)
    return packed


def unpack_planes(
    data: Buffer, dtype: npt.DTypeLike, n_values: int, *, max_window: int, field: str
) -> Values:
    """`n_values` numbers, flat. `max_window`: bytes that zstd may take for its window. Raises BadTensor
    naming `field`, before anything is unpacked that is not of this size."""
    import zstandard

    itemsize = np.dtype(dtype).itemsize
    n_bytes = itemsize * n_values
    decompressor: Any = zstandard.ZstdDecompressor(max_window_size=max_window)
    try:
        # What it says first: zstd takes that much memory. Unknown sizes are refused, so that no frame is
        # unpacked to see how large it is.
        declared = zstandard.frame_content_size(data)
        if declared != n_bytes:
            raise BadTensor(f"{field}.data", f"unpacks to {declared} bytes where the shape wants {n_bytes}")
        planes = decompressor.decompress(data, max_output_size=n_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadTensor(f"{field}.data", f"is no zstd frame: {error}") from None
    if len(planes) != n_bytes:
        raise BadTensor(f"{field}.data", f"unpacks to {len(planes)} bytes where the shape wants {n_bytes}")
    values = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T)
    return values.view(dtype).reshape(-1)
