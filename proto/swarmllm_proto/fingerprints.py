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

_F16: Final = np.dtype("<f2")
_F16_MAX: Final = np.float32(65504.0)
_F16_MIN: Final = -_F16_MAX
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
    """`drawn`: f32 [N_DRAWN], logits of `drawn_tokens`; `largest`: of all; `own`: of the token itself."""
    values = np.empty(N_VALUES, np.float32)
    values[:N_DRAWN] = drawn
    values[N_DRAWN], values[N_DRAWN + 1] = largest, own
    np.minimum(values, _F16_MAX, out=values)
    return np.maximum(values, _F16_MIN, out=values).astype(_F16).tobytes()


def decode_fingerprint(data: bytes) -> Values:
    """f32 [N_VALUES], finite. Raises ValueError."""
    if len(data) != FINGERPRINT_BYTES:
        raise ValueError(f"{len(data)} bytes, not {FINGERPRINT_BYTES}")
    values = np.frombuffer(data, _F16).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("logits that are no numbers")
    return values
