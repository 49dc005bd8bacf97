"""Fingerprints of the logits that a token was sampled from: few enough bytes to send with every token, and
enough to recognise the logits when somebody computes them again.

Which tokens' logits are told follows from a number that the origin draws for each request, and from the
token's index. The stage that tells them with the token cannot know whether a node will look.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

N_DRAWN: Final = 16
"""Tokens whose logits are told."""
N_VALUES: Final = N_DRAWN + 2
"""And the largest logit, and that of the token itself."""
FINGERPRINT_BYTES: Final = 2 * N_VALUES
"""f16 each, little-endian."""
STRETCH: Final = 32
"""Indices of tokens that are drawn for at once."""

_HIGH_BYTES_OF_FINITE: Final = bytes(high for high in range(256) if high & 0x7C != 0x7C)
_F16: Final = np.dtype("<f2")
_F16S: Final = Struct(f"<{N_VALUES}e")
_F16_MAX: Final = 65504.0
_STRETCH_OF_KEY: Final = Struct("<QQ")

Values = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def _drawn_of_stretch(key: int, stretch: int, n_vocab: int) -> Ids:
    data = blake3(_STRETCH_OF_KEY.pack(key, stretch)).digest(length=4 * STRETCH * N_DRAWN)
    numbers = np.frombuffer(data, "<u4").astype(np.int64) % n_vocab
    return numbers.reshape(STRETCH, N_DRAWN)


def drawn_tokens(key: int, index: int, n_vocab: int) -> Ids:
    """i64 [N_DRAWN], ids of the tokens whose logits are told with the generated token `index`; one may be
    drawn twice."""
    stretch, at = divmod(index, STRETCH)
    ids: Ids = _drawn_of_stretch(key, stretch, n_vocab)[at]
    return ids


def encode_fingerprint(drawn: Values, largest: float, own: float) -> bytes:
    """`drawn`: f32 [N_DRAWN], logits of `drawn_tokens`; `largest`: of all; `own`: of the token itself. What
    is beyond f16 becomes its largest value. As in `check_fingerprint`, little of numpy's code runs."""
    values = (*drawn.tolist(), float(largest), float(own))
    try:
        data = _F16S.pack(*values)
    except OverflowError:
        data = b""
    if not data or data[1::2].translate(None, _HIGH_BYTES_OF_FINITE):
        data = _F16S.pack(*[min(max(value, -_F16_MAX), _F16_MAX) for value in values])
    return data


def check_fingerprint(data: bytes) -> None:
    """Raises ValueError for what `decode_fingerprint` refuses. One comes with every token, while the caches
    hold nothing of numpy's code: this calls none of it."""
    if len(data) != FINGERPRINT_BYTES:
        raise ValueError(f"{len(data)} bytes, not {FINGERPRINT_BYTES}")
    if data[1::2].translate(None, _HIGH_BYTES_OF_FINITE):
        raise ValueError("logits that are no numbers")


def decode_fingerprint(data: bytes) -> Values:
    """f32 [N_VALUES], finite. Raises ValueError."""
    check_fingerprint(data)
    return np.frombuffer(data, _F16).astype(np.float32)
