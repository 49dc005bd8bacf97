"""Scales down the pictures that a client wants looked at with low detail, before they are encoded.

The smaller picture is a file of its own: it is kept, sent and checked as if the client had sent it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import trio

from swarmllm.errors import InvalidRequest
from swarmllm.pictures import Medium, Picture, parse_picture
from swarmllm.pipeline.stage.compute import Compute

KEPT_BYTES: Final = 16 * 2**20
"""Of smaller pictures, for the later turns of their conversations."""


class PictureScaler:
    def __init__(self, compute: Compute, max_bytes: int = KEPT_BYTES) -> None:
        self._compute = compute
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, int], Picture] = OrderedDict()
        """By digest and `side_max`."""
        self._n_bytes = 0

    async def scaled(self, medium: Medium, field: str) -> Medium:
        """A picture with a `side_max` as a PNG whose longer side has so many pixels; sounds, and all other
        pictures, as they are. Raises InvalidRequest naming the field where it cannot be decoded, and as
        `Compute.recode_picture` does."""
        if not isinstance(medium, Picture) or not medium.is_too_large:
            return medium
        key = medium.digest, medium.side_max
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        try:
            data = await self._compute.recode_picture(medium, side_max=medium.side_max)
        except InvalidRequest as error:
            # The worker names its own field.
            raise InvalidRequest(error.message, field=field) from None
        smaller = await trio.to_thread.run_sync(parse_picture, data, field)
        self._keep(key, smaller)
        return smaller

    def _keep(self, key: tuple[str, int], smaller: Picture) -> None:
        if key in self._kept or len(smaller.data) > self._max_bytes:
            return
        self._kept[key] = smaller
        self._n_bytes += len(smaller.data)
        while self._n_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._n_bytes -= len(dropped.data)
