"""What a worker measured about its matrix products, and which way it computes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

KernelMode = Literal["auto", "ggml", "ours"]
"""Whose products of Q8_0 are computed: those that were measured as the fastest, or always one side's."""
KernelWay = Literal["ggml-dots", "ggml-tiles", "avx2", "avx512", "avx512-in-order"]
Nanoseconds = Annotated[int, Meta(ge=0, le=10**15)]


class KernelChoice(msgspec.Struct, frozen=True):
    """How products of batches of some sizes are computed with matrices of one row length."""

    type: Literal["Q8_0"]
    k: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Numbers of a matrix row."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)]
    first_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    last_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """The batch sizes from `first_rows`, which was measured, to this."""
    chosen: KernelWay
    ggml_ns: Nanoseconds
    """Per product with a slice of a matrix, of ggml's fastest way that has the right bits."""
    ours_ns: Nanoseconds
    """Of our fastest; 0: none has the right bits."""
