"""Reads the format and length of a sound from its header; nothing is decoded outside the encoder's
process."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from swarmllm.errors import InvalidRequest
from swarmllm_proto.ipc import SoundKind
from swarmllm_proto.limits import MIB, SOUND_BYTES_MAX
from swarmllm_proto.sound_headers import BadSound, read_sound_header


@dataclass(frozen=True, slots=True, repr=False)
class Sound:
    """A file whose header says that it is a sound within the limits. Only `parse_sound` makes one.

    It has not been decoded and may be damaged."""

    data: bytes
    kind: SoundKind
    seconds: float | None
    """None: an MP3, which does not say it."""
    digest: str
    """BLAKE3 of `data`, in hexadecimal."""

    def __repr__(self) -> str:
        length = "" if self.seconds is None else f" {self.seconds:.1f} s"
        return f"<Sound {self.kind}{length} {len(self.data)} bytes>"


def parse_sound(data: bytes, field: str) -> Sound:
    """Raises InvalidRequest naming the field."""
    if len(data) > SOUND_BYTES_MAX:
        raise InvalidRequest(f"the sound is larger than {SOUND_BYTES_MAX // MIB} MiB.", field=field)
    try:
        header = read_sound_header(data)
    except BadSound as error:
        raise InvalidRequest(f"{error}.", field=field) from None
    seconds = None if header.n_samples is None else header.n_samples / header.sample_rate
    return Sound(data, header.kind, seconds, blake3(data).hexdigest())
