"""Decides whether pictures and their rows are compressed for a slow line. Pure, but for `measured_half`,
which times this machine.

Rows are rounded to f16, and pictures go through JPEG, so that the answer is no longer exactly that of a
picture encoded here: neither is done for a node whose requests are to be exact, nor for a gain that nobody
would notice.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Final, Literal, TypeAlias

import numpy as np

from swarmllm.pictures import Picture
from swarmllm.pipeline.route.row_formats import Packing
from swarmllm_proto.half_rows import pack_half, rounded_to_half, unpack_half

PictureCompression: TypeAlias = Literal["off", "auto", "always"]
"""What `inference.picture_compression` may say."""
WORTH_S: Final = 0.02
"""What packing must gain for a picture."""
JPEG_BYTES_PER_PIXEL: Final = 0.4
"""Of photographs at quality 90, about; drawings have less."""
RECODING_S_PER_PIXEL: Final = 1e-7
"""Decoding a PNG and writing a JPEG, on a slow core."""
STARTING_S: Final = 1.0
"""A process that decodes."""
SAMPLE_ROWS: Final = 32
_ROUNDS: Final = 3


def rounds_rows(
    compression: PictureCompression,
    n_bytes: int,
    bytes_per_s: float | None,
    packing: Packing,
    *,
    is_exact: bool,
) -> bool:
    """Whether rows are asked for as f16. `n_bytes`: of the rows as f32, about. `bytes_per_s`: of the line to
    the encoder that is asked first; None: not measured, then "auto" waits until it is."""
    if is_exact or compression == "off":
        return False
    if compression == "always":
        return True
    if bytes_per_s is None:
        return False
    saved_s = packing.saved * n_bytes / bytes_per_s
    return saved_s - packing.seconds_per_byte * n_bytes > WORTH_S


def recodes_picture(
    compression: PictureCompression,
    picture: Picture,
    bytes_per_s: float | None,
    *,
    can_now: bool,
    is_exact: bool,
) -> bool:
    """Whether a picture goes as JPEG: never one that is a JPEG already. `bytes_per_s`: of the line, as above.
    `can_now`: no process has to be started for it."""
    if is_exact or compression == "off" or picture.kind == "jpeg":
        return False
    if compression == "always":
        return True
    if bytes_per_s is None:
        return False
    n_pixels = picture.width * picture.height
    saved_s = (len(picture.data) - JPEG_BYTES_PER_PIXEL * n_pixels) / bytes_per_s
    return saved_s - RECODING_S_PER_PIXEL * n_pixels - (0.0 if can_now else STARTING_S) > WORTH_S


@lru_cache(maxsize=16)
def measured_half(width: int) -> Packing:
    """Of numbers like those of rows; takes milliseconds, once per width."""
    rows = np.random.default_rng(0).standard_normal((SAMPLE_ROWS, width)).astype(np.float32)
    packed, took_s = b"", float("inf")
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        half = rounded_to_half(rows)
        packed = pack_half(rows if half is None else half)
        unpack_half(packed, n_rows=SAMPLE_ROWS, width=width)
        took_s = min(took_s, time.perf_counter() - began_s)
    return Packing(1 - len(packed) / rows.nbytes, took_s / rows.nbytes)
