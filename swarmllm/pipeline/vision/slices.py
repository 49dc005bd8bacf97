"""Encoded pictures as they travel between nodes: parts, slices of rows, and a digest of all of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import UNSET

from swarmllm.models.projector import ON_GRID, SEEING
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.workerpool.encoders import EncodedPicture, RowsNotFinite, encoded_picture
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.frames import Buffer
from swarmllm_proto.half_rows import unpack_half
from swarmllm_proto.identifiers import Digest, ModelId
from swarmllm_proto.ipc import PicturePart
from swarmllm_proto.limits import IMAGE_ROWS_MAX
from swarmllm_proto.swarm import VisionEncodeResponse
from swarmllm_proto.swarm.vision import bound_digest

HALF: Final = "half"
"""How rows may travel besides f32: see `swarmllm_proto.half_rows`."""
TOKENS_MAX: Final = 4096
"""In one part."""
PICTURE_TOKENS_MAX: Final = 65536
"""Around the rows of one picture."""


class WrongPicture(Exception):
    """A node's encoded picture cannot be right. `event`: the fault of the node."""

    def __init__(self, why: str, event: TrustEvent = TrustEvent.BROKE_PROTOCOL) -> None:
        super().__init__(why)
        self.trust_event = event


def parts_of(encoded: EncodedPicture) -> tuple[PicturePart, ...]:
    """Of which `encoded_picture` makes the same again."""
    edges = sorted({0, *encoded.ends, len(encoded.tokens)})
    runs = {run.first_row: run for run in encoded.runs}
    parts: list[PicturePart] = []
    for start, end in pairwise(edges):
        if start in runs:
            parts.append(PicturePart((), end - start, runs[start].grid_width, runs[start].is_causal))
        elif encoded.tokens[start] < 0:
            parts.append(PicturePart((), end - start))
        else:
            parts += [
                PicturePart(tuple(encoded.tokens[at : min(at + TOKENS_MAX, end)].tolist()))
                for at in range(start, end, TOKENS_MAX)
            ]
    return tuple(parts)


def rows_each(n_embd: int) -> int:
    """In one response; 0: one row is too large for it."""
    return IMAGE_ROWS_MAX // (4 * n_embd)


def rows_of(said: VisionEncodeResponse, n_left: int) -> Buffer:
    """f32 bytes of the rows of one response, of which so many are left of the picture; unpacking takes
    milliseconds. Raises WrongPicture."""
    row_bytes = 4 * said.n_embd
    if said.rows_as is UNSET:
        if not said.rows or len(said.rows) % row_bytes or len(said.rows) > n_left * row_bytes:
            raise WrongPicture(f"{len(said.rows)} bytes are no rows of the picture")
        return said.rows
    n_here = said.n_here or 0
    if said.rows_as != HALF or not 0 < n_here <= n_left:
        raise WrongPicture(f"{n_here} rows as {said.rows_as} are no rows of the picture")
    try:
        rows = unpack_half(said.rows, n_rows=n_here, width=said.n_embd)
    except BadTensor as error:
        raise WrongPicture(str(error)) from None
    return np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8).data


def require_places(encoded: EncodedPicture, architecture: str) -> None:
    """That rows stand, and see, as the model's do. Raises WrongPicture."""
    laid_out = {run.first_row: run for run in encoded.runs}
    starts = [at for at in (0, *encoded.ends) if at < len(encoded.tokens) and encoded.tokens[at] < 0]
    for start in starts:
        run = laid_out.get(start)
        is_on_grid, is_causal = bool(run and run.grid_width), run is None or run.is_causal
        if is_on_grid is not (architecture in ON_GRID) or is_causal is (architecture in SEEING):
            raise WrongPicture(f"its rows do not stand as those of pictures do in {architecture} models")


def assembled(
    model_id: ModelId,
    projector: Digest,
    picture: Digest,
    parts: tuple[PicturePart, ...],
    rows: bytes | bytearray,
    digest: bytes,
    *,
    n_embd: int,
    n_vocab: int,
) -> EncodedPicture:
    """Of `rows` from another node, f32, `n_embd` each; takes milliseconds for megabytes. Raises
    WrongPicture."""
    if bound_digest(model_id, projector, picture, parts, rows) != digest:
        raise WrongPicture("the digest is not that of this picture's rows", TrustEvent.DAMAGED)
    n_tokens = sum(len(part.tokens) for part in parts)
    if n_tokens > PICTURE_TOKENS_MAX or any(token >= n_vocab for part in parts for token in part.tokens):
        raise WrongPicture("there are tokens around the picture that the model does not have")
    try:
        return encoded_picture(parts, np.frombuffer(rows, "<f4").reshape(-1, n_embd), n_embd)
    except RowsNotFinite as error:
        raise WrongPicture(str(error), TrustEvent.BAD_NUMBERS) from None
    except ValueError as error:
        raise WrongPicture(str(error)) from None
