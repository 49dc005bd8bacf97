"""Reads the headers of sound files: WAV, FLAC and MP3.

Nothing is decoded. The daemon refuses by it what is too long or nothing that an encoder reads; the worker
that decodes learns from it where the sound begins and ends, so that its decoder never sees tags, cover
pictures or what else a file has around its sound.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from swarmllm_proto.frames import Buffer
from swarmllm_proto.ipc.vision import SoundKind
from swarmllm_proto.limits import SOUND_CHANNELS_MAX, SOUND_RATE_MAX, SOUND_RATE_MIN, SOUND_SECONDS_MAX

SOUND_NAMES: Final = "WAV, MP3 and FLAC"
WAV_CHUNKS_MAX: Final = 64
FLAC_BLOCKS_MAX: Final = 256
ID3_TAGS_MAX: Final = 8

_PCM: Final = 1
_FLOAT: Final = 3
_EXTENSIBLE: Final = 0xFFFE
_BITS: Final = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
_GUID_END: Final = bytes.fromhex("000000001000800000aa00389b71")
"""Of the kinds of samples that an extensible WAV may name, behind the number that a plain one gives."""
_STREAMED: Final = 0xFFFFFFFF
"""The size of a WAV that was written before its end was known."""
_STREAMINFO_BYTES: Final = 34
_MP3_RATES: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
"""In Hz, by version: MPEG 1, 2, 2.5."""
_MP3_KBITS: Final = {
    3: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_ENDINGS: Final = (b"TAG", b"APETAGEX", b"LYRICSBEGIN", b"ID3", b"\0")
"""What may stand behind the last frame: tags, and padding."""


class BadSound(Exception):
    """Why a file is no sound that is read, as a sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class SoundHeader:
    kind: SoundKind
    sample_rate: int
    """Hz."""
    n_channels: int
    n_samples: int | None
    """Of each channel; None: an MP3 does not say it."""
    start: int
    """Where the sound begins in the file: samples of a WAV, frames of a FLAC or MP3."""
    end: int
    info: bytes
    """What a decoder has to know before: of a WAV its `fmt ` without extensions, of a FLAC its STREAMINFO."""


def read_sound_header(data: Buffer) -> SoundHeader:
    """Raises BadSound."""
    data = memoryview(data)
    start = bytes(data[:12])
    try:
        if start.startswith(b"RIFF") and start.endswith(b"WAVE"):
            header = _wav(data)
        elif start.startswith(b"fLaC"):
            header = _flac(data)
        elif looks_like_mp3(data):
            header = _mp3(data)
        else:
            raise BadSound(f"this is none of {SOUND_NAMES}" if data else "the sound is empty")
    except (struct.error, IndexError):
        raise BadSound("the sound ends within its header") from None
    if not SOUND_RATE_MIN <= header.sample_rate <= SOUND_RATE_MAX:
        raise BadSound(
            f"the sound has {header.sample_rate} samples a second; {SOUND_RATE_MIN} to {SOUND_RATE_MAX} are"
            " read"
        )
    if not 1 <= header.n_channels <= SOUND_CHANNELS_MAX:
        raise BadSound(f"the sound has {header.n_channels} channels; 1 to {SOUND_CHANNELS_MAX} are read")
    if header.n_samples is not None:
        if not header.n_samples:
            raise BadSound("the sound is empty")
        if header.n_samples > SOUND_SECONDS_MAX * header.sample_rate:
            raise BadSound(f"the sound is longer than {SOUND_SECONDS_MAX} s")
    return header


def looks_like_mp3(data: Buffer) -> bool:
    """By its first bytes: a tag, or a frame of layer III."""
    start = bytes(memoryview(data)[:3])
    return start == b"ID3" or (start[:1] == b"\xff" and len(start) > 1 and start[1] & 0xE6 == 0xE2)


def _wav(data: memoryview) -> SoundHeader:
    at, fmt = 12, b""
    for _ in range(WAV_CHUNKS_MAX):
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"fmt ":
            fmt = bytes(data[at : at + min(size, 40)])
        elif name == b"data":
            n_left = len(data) - at
            if size != _STREAMED and size > n_left:
                raise BadSound(f"the WAV ends early: it says {size} bytes of sound and has {n_left}")
            return _wav_header(fmt, at, at + min(size, n_left))
        at += size + size % 2
    raise BadSound(f"the WAV has more than {WAV_CHUNKS_MAX} chunks before its sound")


def _wav_header(fmt: bytes, start: int, end: int) -> SoundHeader:
    if not fmt:
        raise BadSound("the WAV does not say what its samples are")
    tag, n_channels, rate, _, row_bytes, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == _EXTENSIBLE:
        (tag,) = struct.unpack_from("<H", fmt, 24)
        if fmt[26:40] != _GUID_END:
            tag = 0
    if bits not in _BITS.get(tag, ()):
        raise BadSound("this kind of WAV is not read: only whole numbers of 8 to 32 bits, and floats")
    if row_bytes != n_channels * bits // 8 or not row_bytes:
        raise BadSound("the header of the WAV is damaged")
    n_samples = (end - start) // row_bytes
    info = struct.pack("<HHIIHH", tag, n_channels, rate, (rate * row_bytes) & 0xFFFFFFFF, row_bytes, bits)
    return SoundHeader("wav", rate, n_channels, n_samples, start, start + n_samples * row_bytes, info)


def _flac(data: memoryview) -> SoundHeader:
    at, info = 4, b""
    for number in range(FLAC_BLOCKS_MAX):
        (word,) = struct.unpack_from(">I", data, at)
        is_last, kind, size = word >> 31, word >> 24 & 0x7F, word & 0xFFFFFF
        at += 4
        if not number:
            info = bytes(data[at : at + size])
            if kind or size != _STREAMINFO_BYTES or len(info) < size:
                raise BadSound("the header of the FLAC is damaged")
        at += size
        if is_last:
            break
    else:
        raise BadSound(f"the FLAC has more than {FLAC_BLOCKS_MAX} blocks before its sound")
    if data[at] != 0xFF or data[at + 1] & 0xFE != 0xF8:
        raise BadSound("the header of the FLAC is damaged")
    block_min, block_max = struct.unpack_from(">HH", info)
    (word,) = struct.unpack_from(">Q", info, 10)
    rate, n_channels, bits = word >> 44, (word >> 41 & 7) + 1, (word >> 36 & 31) + 1
    if not 16 <= block_min <= block_max or bits < 4:
        raise BadSound("the header of the FLAC is damaged")
    n_samples = word & 0xFFFFFFFFF
    if not n_samples:
        raise BadSound("the FLAC does not say how long it is, as one that was written to a pipe")
    return SoundHeader("flac", rate, n_channels, n_samples, at, len(data), info)


@dataclass(frozen=True, slots=True)
class _Mp3Frame:
    version: int
    sample_rate: int
    n_channels: int
    n_samples: int
    n_bytes: int

    def length_place(self, frame: memoryview) -> int | None:
        """Where in its bytes it says how many frames follow (a tag of Xing or LAME), as u32; None: it does
        not."""
        mono, stereo = (17, 32) if self.version == 3 else (9, 17)
        checksum = 0 if frame[1] & 1 else 2
        tag = 4 + checksum + (mono if self.n_channels == 1 else stereo)
        if bytes(frame[tag : tag + 4]) not in (b"Xing", b"Info") or len(frame) < tag + 12:
            return None
        return tag + 8 if frame[tag + 7] & 1 else None

    @property
    def kind(self) -> tuple[int, int]:
        """The same for all frames of a file."""
        return self.version, self.sample_rate


def _mp3(data: memoryview) -> SoundHeader:
    at = 0
    for _ in range(ID3_TAGS_MAX):
        if bytes(data[at : at + 3]) != b"ID3":
            break
        flags, *size = struct.unpack_from("5B", data, at + 5)
        if any(part & 0x80 for part in size):
            raise BadSound("the tag of the MP3 is damaged")
        at += 10 + sum(part << shift for part, shift in zip(size, (21, 14, 7, 0), strict=True))
        at += 10 if flags & 0x10 else 0
    frame = _mp3_frame(data, at)
    if frame is None:
        raise BadSound("the MP3 does not begin with a frame of layer III, or is damaged")
    return SoundHeader("mp3", frame.sample_rate, frame.n_channels, None, at, len(data), b"")


def _mp3_frame(data: memoryview, at: int) -> _Mp3Frame | None:
    """None: there is no frame, or its header is cut off."""
    if at + 4 > len(data):
        return None
    (word,) = struct.unpack_from(">I", data, at)
    version, layer = word >> 19 & 3, word >> 17 & 3
    bitrate, rate = word >> 12 & 15, word >> 10 & 3
    if word >> 21 != 0x7FF or version == 1 or layer != 1 or bitrate in (0, 15) or rate == 3:
        return None
    sample_rate = _MP3_RATES[version][rate]
    n_samples = 1152 if version == 3 else 576
    bits_per_s = 1000 * _MP3_KBITS[3 if version == 3 else 2][bitrate - 1]
    n_bytes = n_samples // 8 * bits_per_s // sample_rate + (word >> 9 & 1)
    return _Mp3Frame(version, sample_rate, 1 if word >> 6 & 3 == 3 else 2, n_samples, n_bytes)


def mp3_frames(data: Buffer, header: SoundHeader) -> bytes:
    """The whole frames of an MP3, found by going from one to the next: at most some ten thousand of them. One
    that says how many follow (the first, and for a decoder that cannot read that one, the next) says what is
    so: decoders take so much memory. Raises BadSound where they are longer than they may be, or damaged."""
    data, at = memoryview(data), header.start
    first = _mp3_frame(data, at)
    n_frames = n_samples = 0
    told: list[int] = []
    while (frame := _mp3_frame(data, at)) is not None and first is not None and frame.kind == first.kind:
        if at + frame.n_bytes > len(data):
            break
        if (place := frame.length_place(data[at : at + frame.n_bytes])) is not None:
            told.append(at - header.start + place)
        at += frame.n_bytes
        n_frames += 1
        n_samples += frame.n_samples
        if n_samples > SOUND_SECONDS_MAX * header.sample_rate:
            raise BadSound(f"the sound is longer than {SOUND_SECONDS_MAX} s")
    else:
        # What is left is shorter than a frame's header, or no frame.
        if len(data) - at >= 4 and not bytes(data[at : at + 16]).startswith(_MP3_ENDINGS):
            raise BadSound(f"the MP3 is damaged at byte {at}")
    if first is None or not n_frames:
        raise BadSound("the MP3 has no whole frame")
    frames = bytearray(data[header.start : at])
    for place in told:
        frames[place : place + 4] = struct.pack(">I", n_frames - 1)
    return bytes(frames)
