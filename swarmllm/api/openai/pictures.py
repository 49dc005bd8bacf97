"""Collects the pictures and sounds of one request, of whatever dialect, and parses them away from the event
loop.

A dialect hands over what stands in its body, and puts the marker that it gets into the text of the message.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import trio
from quart import current_app

from swarmllm.api.http.context import current_charge, current_config, current_node
from swarmllm.api.openai.remote_pictures import Charge, PictureFetcher
from swarmllm.errors import InvalidRequest
from swarmllm.pictures import (
    LOW_DETAIL_SIDE,
    NO_PICTURES,
    PICTURES_MAX,
    Marker,
    Medium,
    MediumName,
    Picture,
    PromptPictures,
    marker_of,
    name_of,
    parse_picture,
)
from swarmllm.sounds import parse_sound
from swarmllm_proto.limits import MIB, PICTURE_BYTES_MAX, SOUND_BYTES_MAX

FETCHER = "swarmllm.fetcher"
SEND_IT = "Send the picture itself as a data URL (data:image/png;base64,...)."
BYTES_MAX: Mapping[MediumName, int] = {"picture": PICTURE_BYTES_MAX, "sound": SOUND_BYTES_MAX}
PARSERS: Mapping[MediumName, Callable[[bytes, str], Medium]] = {
    "picture": parse_picture,
    "sound": parse_sound,
}
PIECE = 2**18
"""Characters, a multiple of 4."""


@dataclass(frozen=True, slots=True)
class _Asked:
    data: str | bytes
    """Base64, or what was fetched."""
    field: str
    medium: MediumName
    side_max: int = 0
    """As of a Picture."""


class RequestPictures:
    def __init__(self, earlier: Mapping[str, Medium] | None = None) -> None:
        """`earlier`: pictures and sounds of earlier turns, whose markers stand in the messages already."""
        self._nonce = secrets.token_hex(16)
        self._earlier = dict(earlier or {})
        self._asked: dict[Marker, _Asked] = {}
        self._remote: dict[Marker, tuple[str, str]] = {}
        """(https address, field) of those that are not fetched yet; they are in `_asked`, too."""

    def __bool__(self) -> bool:
        return bool(self._earlier or self._asked)

    @property
    def field(self) -> str:
        """Of the first one that is new."""
        return next((asked.field for asked in self._asked.values()), "messages")

    @property
    def needs(self) -> frozenset[MediumName]:
        """What the model has to take."""
        earlier = {name_of(each) for each in self._earlier.values()}
        return frozenset(earlier | {asked.medium for asked in self._asked.values()})

    def add_url(self, url: str, field: str, *, is_low: bool = False) -> Marker:
        """A data URL, or an address. `is_low`: the picture is wanted with low detail. Raises InvalidRequest
        for what is neither."""
        if url[:8].lower() == "https://":
            marker = self._add(b"", field, is_low=is_low)
            self._remote[marker] = url, field
            return marker
        head, comma, data = url.partition(",")
        if not head[:5].lower() == "data:":
            raise InvalidRequest(f"is no data URL. {SEND_IT}", field=field)
        # What the URL says of the type is not believed: the bytes tell it.
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidRequest("a data URL with a picture has to be in base64.", field=field)
        return self._add(data, field, is_low=is_low)

    def add_base64(self, data: str, field: str, medium: MediumName = "picture") -> Marker:
        """Raises InvalidRequest for one too many."""
        return self._add(data, field, medium)

    def _add(
        self, data: str | bytes, field: str, medium: MediumName = "picture", *, is_low: bool = False
    ) -> Marker:
        if len(self._earlier) + len(self._asked) >= PICTURES_MAX:
            raise InvalidRequest(
                f"at most {PICTURES_MAX} pictures and sounds are taken at once.", field=field
            )
        marker = marker_of(self._nonce, len(self._asked))
        self._asked[marker] = _Asked(data, field, medium, LOW_DETAIL_SIDE if is_low else 0)
        return marker

    async def fetch(self, fetcher: PictureFetcher | None, charge: Charge) -> None:
        """Those that are named by an address. Raises InvalidRequest, also for one without a fetcher, and
        Overloaded."""
        remote, self._remote = self._remote, {}
        if not remote:
            return
        if fetcher is None:
            _, field = next(iter(remote.values()))
            raise InvalidRequest(f"this node fetches no pictures (api.fetch_images). {SEND_IT}", field=field)
        fetched = await fetcher.fetch_all(list(remote.values()), charge)
        for marker, data in zip(remote, fetched, strict=True):
            self._asked[marker] = replace(self._asked[marker], data=data)

    def parse(self) -> PromptPictures:
        """After `fetch`. Raises InvalidRequest. Takes some milliseconds per megabyte."""
        found = dict(self._earlier)
        for marker, asked in self._asked.items():
            data = asked.data if isinstance(asked.data, bytes) else _decode(asked.data, asked)
            medium = PARSERS[asked.medium](data, asked.field)
            if isinstance(medium, Picture):
                medium = replace(medium, side_max=asked.side_max)
            found[marker] = medium
        return PromptPictures(found, self.field)


def _decode(text: str, asked: _Asked) -> bytes:
    """Line breaks in base64 are allowed, as in mail. Raises InvalidRequest."""
    if "\n" in text:
        text = text.replace("\r", "").replace("\n", "")
    n_max = BYTES_MAX[asked.medium]
    if len(text) > (n_max + 2) // 3 * 4:
        raise InvalidRequest(f"the {asked.medium} is larger than {n_max // MIB} MiB.", field=asked.field)
    try:
        # In pieces, each of which holds up other threads for about a millisecond.
        pieces = range(0, len(text), PIECE)
        return b"".join(base64.b64decode(text[at : at + PIECE], validate=True) for at in pieces)
    except (binascii.Error, ValueError):
        raise InvalidRequest("this is not base64.", field=asked.field) from None


async def seen_by(model: str, asked: RequestPictures, field: str) -> PromptPictures:
    """The request's pictures and sounds, parsed. `field`: what the API calls the conversation. Raises
    ModelNotFound, and InvalidRequest where the model does not take them, or one of them is none or cannot be
    fetched."""
    if not asked:
        return NO_PICTURES
    await current_node().require_encoder(model, asked.field, asked.needs)
    fetcher = cast(PictureFetcher, current_app.extensions[FETCHER])
    await asked.fetch(fetcher if current_config().api.fetch_images else None, current_charge())
    return replace(await trio.to_thread.run_sync(asked.parse), field=field)
