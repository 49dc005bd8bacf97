"""Messages between the daemon and a worker that encodes pictures and sounds (see `ipc`).

Such a worker owns one projector: `OpenProjector` names it, each `EncodePicture` brings one picture, each
`EncodeSound` one sound, and `Shutdown` ends it. `RecodePicture` needs none. It runs no layers, and a model
worker refuses these messages.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.base import DaemonMessage, Dimension, Seconds, TokenCount, TokenId, WorkerMessage

PICTURE_PARTS_MAX = 4096
"""A picture of many tiles has tokens before, between and after them."""

PictureKind: TypeAlias = Literal["png", "jpeg", "webp", "gif"]
MediumWord = Annotated[str, Meta(max_length=16)]
SoundKind: TypeAlias = Literal["wav", "mp3", "flac"]
PictureSide = Annotated[int, Meta(ge=1, le=65535)]


class OpenProjector(DaemonMessage, frozen=True, tag=True):
    """First message: which projector this worker runs, and for which model, of which it reads metadata and
    vocabulary only. Answered by ProjectorOpened, after a grey picture, or half a second of silence where it
    takes sounds, has been encoded."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Of the model's GGUF; of several files, the first."""
    projector: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Of the projector's GGUF (mmproj)."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)] = 1


class ProjectorOpened(WorkerMessage, frozen=True, tag=True):
    """Answers OpenProjector."""

    n_embd: Dimension
    """Width of a picture's rows: the model's."""
    n_rows: TokenCount
    """That the grey picture and the silence became."""
    takes: Annotated[tuple[MediumWord, ...], Meta(min_length=1, max_length=8)] | UnsetType = UNSET
    """What it encodes: "picture", "sound"; unset: pictures."""


class EncodePicture(DaemonMessage, frozen=True, tag=True):
    """Payload: the file of a picture. Answered by PictureEncoded."""

    kind: PictureKind
    """What the file is; another one is refused, whatever it is."""
    width: PictureSide
    height: PictureSide
    """As its header says; a file that decodes to another size is refused."""


class EncodeSound(DaemonMessage, frozen=True, tag=True):
    """Payload: the file of a sound. Answered by PictureEncoded: its rows are as those of a picture."""

    kind: SoundKind
    """What the file is; another one is refused, whatever it is."""


class RecodePicture(DaemonMessage, frozen=True, tag=True):
    """Payload: the file of a picture, which is to become a smaller one; also before OpenProjector. Answered
    by PictureRecoded."""

    kind: PictureKind
    width: PictureSide
    height: PictureSide
    """As in EncodePicture."""
    side_max: PictureSide | UnsetType = UNSET
    """Pixels of the longer side of what it is to become: a PNG then, with no more pixels than now."""


class PictureRecoded(WorkerMessage, frozen=True, tag=True):
    """Answers RecodePicture. Payload: a JPEG of quality 90, or with `side_max` a PNG, upright, over white
    where it was transparent."""


class PicturePart(msgspec.Struct, frozen=True, array_like=True):
    """A run of positions that a picture or a sound takes in a prompt; travels as an array of its fields in
    this order."""

    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    """Of the vocabulary, which mark the picture or a tile of it; none: the positions hold rows."""
    n_rows: TokenCount = 0
    grid_width: TokenCount = 0
    """As in PictureRun."""
    is_causal: bool = True
    """As in PictureRun."""


class PictureEncoded(WorkerMessage, frozen=True, tag=True):
    """Answers EncodePicture and EncodeSound. Payload: f32 [n, n_embd], the rows of all parts in their
    order."""

    parts: Annotated[tuple[PicturePart, ...], Meta(min_length=1, max_length=PICTURE_PARTS_MAX)]
    compute_s: Seconds = 0.0
