"""Encodes pictures and sounds in worker processes of their own kind, one for each projector that is in use.

Everything here about pictures holds for sounds. A damaged picture or projector ends such a process and
nothing else. Pictures are encoded one after the other, each with a deadline, at which the process is killed.
Encoded pictures are cached, so that the next turn of a conversation does not encode them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import trio
from msgspec import UNSET

from swarmllm.errors import InvalidRequest, WorkerError
from swarmllm.models.projector import Projector
from swarmllm.pictures import Medium, Picture
from swarmllm.workerpool.encoder_workers import EncoderWorker, EncoderWorkers
from swarmllm.workerpool.forward_result import Hidden, checked_tensor
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.settings import ModelFile
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import (
    EncodePicture,
    EncodeSound,
    OpenProjector,
    PictureEncoded,
    PicturePart,
    PictureRecoded,
    ProjectorOpened,
    RecodePicture,
)
from swarmllm_proto.limits import PICTURE_BYTES_MAX
from swarmllm_proto.picture_runs import PictureRun

PICTURE_TIMEOUT_S: Final = 120.0
"""For one picture. Encoders take up to some ten seconds for a large one on one core."""
KEPT_BYTES: Final = 256 * 2**20
"""Of rows that pictures became."""
_RECODER: Final = (ModelId(""), "")
"""In place of a model and its projector: what re-encodes pictures that go to other nodes."""
Key = tuple[ModelId, str, str]
"""(model, digest of its projector, digest of the picture)"""


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """The rows and tokens of a picture in a prompt of one model."""

    tokens: npt.NDArray[np.int32]
    """i32 [n]: the token at each position that it takes; -1 where there is a row."""
    rows: Hidden
    """f32 [number of -1, n_embd], read-only."""
    ends: tuple[int, ...]
    """Positions at which a run of rows begins or ends; the rows of a tile are such a run."""
    runs: tuple[PictureRun, ...] = ()
    """Of these runs those that stand on a grid or whose rows see each other."""
    is_rounded: bool = field(default=False, kw_only=True)
    """On the way from another node, to f16."""

    @property
    def n_bytes(self) -> int:
        return self.tokens.nbytes + self.rows.nbytes


class KeptPictures:
    """A cache of the latest encoded pictures, as many as fit."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, EncodedPicture] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> EncodedPicture | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Key, encoded: EncodedPicture) -> None:
        self.drop(key)
        if encoded.n_bytes > self._max_bytes:
            return
        self._kept[key] = encoded
        self.n_bytes += encoded.n_bytes
        while self.n_bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def drop(self, key: Key) -> None:
        if (dropped := self._kept.pop(key, None)) is not None:
            self.n_bytes -= dropped.n_bytes

    def forget(self, model_id: ModelId) -> None:
        for key in [key for key in self._kept if key[0] == model_id]:
            self.drop(key)


class PictureEncoders:
    def __init__(self, hosts: HostedModels) -> None:
        self._hosts = hosts
        self._workers = EncoderWorkers[tuple[ModelId, str], ProjectorOpened](
            hosts, "pictures", ProjectorOpened
        )
        self.kept = KeptPictures()
        self.n_encoded = 0

    async def check_projector(self, model: ModelFile, projector: Projector) -> int:
        """Open it and encode a grey picture; how many rows that became. Raises BadModel, WorkerDied where the
        process did not survive it, WorkerError."""
        async with self._workers.turn((model.model_id, projector.blake3)) as encoder:
            is_open = encoder.serves((model, projector))
            _, opened = await self._open(encoder, model, projector)
        return 0 if is_open else opened.n_rows

    async def encode_picture(
        self, model: ModelFile, projector: Projector, picture: Medium, *, is_kept: bool = True
    ) -> EncodedPicture:
        """`is_kept`: for the next time; not for other nodes, whose pictures would push out those of this
        one's users. Raises InvalidRequest for a picture or sound that cannot be decoded, BadModel, WorkerDied
        (also at the deadline), WorkerError, Overloaded."""
        if len(picture.data) > PICTURE_BYTES_MAX:
            raise InvalidRequest(f"a picture has {PICTURE_BYTES_MAX} bytes at most", field="messages")
        key = model.model_id, projector.blake3, picture.digest
        if is_kept and (kept := self.kept.get(key)) is not None:
            return kept
        async with self._workers.turn((model.model_id, projector.blake3)) as encoder:
            if is_kept and (kept := self.kept.get(key)) is not None:
                return kept
            worker, _ = await self._open(encoder, model, projector)
            told, payload = await worker.call(
                _encode_message(worker.new_id(), picture),
                PictureEncoded,
                payload=picture.data,
                timeout_s=PICTURE_TIMEOUT_S,
            )
            encoded = checked_picture(told, payload, projector.n_embd)
        self.n_encoded += 1
        if is_kept:
            self.kept.put(key, encoded)
        return encoded

    async def recode_picture(self, picture: Picture, *, side_max: int = 0) -> bytes:
        """As a JPEG of quality 90, or, with `side_max`, as a PNG whose longer side has no more pixels than
        that, by a worker that has no projector open. Raises InvalidRequest for a picture that cannot be
        decoded, WorkerDied (also at the deadline), WorkerError, Overloaded."""
        async with self._workers.turn(_RECODER) as encoder:
            worker = await self._workers.bare(encoder)
            message = RecodePicture(
                id=worker.new_id(),
                kind=picture.kind,
                width=picture.width,
                height=picture.height,
                side_max=side_max or UNSET,
            )
            _, payload = await worker.call(
                message, PictureRecoded, payload=picture.data, timeout_s=PICTURE_TIMEOUT_S
            )
        return bytes(payload)

    def can_recode_now(self) -> bool:
        """Without starting a process."""
        return self._workers.is_open(_RECODER)

    async def keep_open(self, model: ModelFile, projector: Projector) -> None:
        """Open it, and do not end its worker where it is idle. Raises as `check_projector` does."""
        await self.check_projector(model, projector)
        self._workers.kept_open.add((model.model_id, projector.blake3))

    def is_open(self, model_id: ModelId, projector: Projector) -> bool:
        return self._workers.is_open((model_id, projector.blake3))

    async def close(self, model_id: ModelId, *, but: str = "") -> None:
        """End the model's workers of this kind, except for the projector with the BLAKE3 `but`; what pictures
        became stays."""
        await self._workers.end(
            lambda key: key[0] == model_id and key[1] != but, "was stopped because it was unloaded"
        )

    async def forget(self, model_id: ModelId) -> None:
        """End the model's workers of this kind, and drop what pictures became for it."""
        self.kept.forget(model_id)
        await self._workers.end(lambda key: key[0] == model_id, "was stopped because its model is forgotten")

    async def _open(
        self, encoder: EncoderWorker[ProjectorOpened], model: ModelFile, projector: Projector
    ) -> tuple[Worker, ProjectorOpened]:
        def message(call_id: int) -> OpenProjector:
            return OpenProjector(
                id=call_id,
                path=str(model.path),
                projector=projector.path,
                n_threads=self._hosts.settings.n_threads,
            )

        def check(opened: ProjectorOpened) -> None:
            if opened.n_embd != projector.n_embd:
                raise WorkerError(f"the projector makes rows of {opened.n_embd}, not {projector.n_embd}")
            takes = ("picture",) if opened.takes is UNSET else opened.takes
            if not projector.takes.issubset(takes):
                raise WorkerError(f"the projector takes {takes}, not {sorted(projector.takes)}")

        await trio.to_thread.run_sync(projector.check_file)
        return await self._workers.open(encoder, model.model_id, (model, projector), message, check)


def _encode_message(call_id: int, medium: Medium) -> EncodePicture | EncodeSound:
    if isinstance(medium, Picture):
        return EncodePicture(id=call_id, kind=medium.kind, width=medium.width, height=medium.height)
    return EncodeSound(id=call_id, kind=medium.kind)


class RowsNotFinite(ValueError):
    """The encoder gave values that are not finite."""


def checked_picture(told: PictureEncoded, payload: memoryview, n_embd: int) -> EncodedPicture:
    """Of a worker, which may be wrong. Raises WorkerError."""
    rows = checked_tensor(payload, "rows of a picture", np.dtype(np.float32), 2)
    try:
        return encoded_picture(told.parts, rows, n_embd)
    except ValueError as error:
        raise WorkerError(f"the worker returned {error}") from None


def encoded_picture(parts: Sequence[PicturePart], rows: Hidden, n_embd: int) -> EncodedPicture:
    """`rows` f32 [n, n_embd] of all parts. Raises ValueError, saying what these are instead."""
    # First of all: so many positions are made below.
    n_rows = sum(part.n_rows for part in parts)
    if not n_rows or rows.shape != (n_rows, n_embd):
        raise ValueError(f"rows of a picture of the wrong shape: {rows.shape}")
    if not np.isfinite(rows).all():
        raise RowsNotFinite("rows of a picture that are not finite")
    runs: list[npt.NDArray[np.int32]] = []
    ends: set[int] = set()
    laid_out: list[PictureRun] = []
    n_positions = 0
    for part in parts:
        if bool(part.tokens) == bool(part.n_rows):
            raise ValueError("a part of a picture that is neither tokens nor rows")
        runs.append(np.array(part.tokens, np.int32) if part.tokens else np.full(part.n_rows, -1, np.int32))
        if part.n_rows:
            ends |= {n_positions, n_positions + part.n_rows}
            if part.grid_width or not part.is_causal:
                laid_out.append(PictureRun(n_positions, part.n_rows, part.grid_width, part.is_causal))
        n_positions += len(runs[-1])
    tokens = np.concatenate(runs)
    rows.flags.writeable = False
    return EncodedPicture(tokens, rows, tuple(sorted(ends)), tuple(laid_out))
