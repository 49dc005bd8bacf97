"""Decodes the file of a sound to samples, within limits that are checked before anything is decoded.

libmtmd's decoder (miniaudio) does it, so that samples are those of libmtmd in one process. It never sees the
file itself: it tries one format after the other, scans for frames of an MP3 in whatever it is given, believes
the length that a header says (an MP3 of a kilobyte makes it take 23 GiB), and of what is no sound at all
libmtmd makes a call of `ffprobe`. What it gets is written anew: a header whose numbers were checked, and
behind it the samples or frames alone.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final

import numpy as np
from llama_cpp import mtmd_cpp as mtmd

from swarmllm_proto.ipc import EncodeSound
from swarmllm_proto.limits import SOUND_SECONDS_MAX
from swarmllm_proto.sound_headers import BadSound, SoundHeader, mp3_frames, read_sound_header
from swarmllm_workers.errors import CallError

SAMPLES_MIN: Final = 16
"""At the encoder's rate: what is shorter is no sound, and libmtmd aborts at a single sample."""
_FLAC_LAST_BLOCK: Final = 0x80 << 24


def samples_of(context: Any, message: EncodeSound, data: memoryview) -> np.ndarray:
    """f32 [n] in one channel, at the rate that the projector open in `context` (of libmtmd) takes, from -1 to
    1. Raises CallError bad_picture."""
    try:
        header = read_sound_header(data)
        if header.kind != message.kind:
            raise BadSound(f"this is a {header.kind} file, not {message.kind}")
        file = rewritten(header, data)
    except BadSound as error:
        raise CallError("bad_picture", str(error), "payload") from None
    rate = mtmd.mtmd_get_audio_sample_rate(context)
    samples = _decoded(context, file)
    if samples is None or not SAMPLES_MIN <= len(samples) <= (SOUND_SECONDS_MAX + 1) * rate:
        raise CallError(
            "bad_picture", f"the {message.kind} file is damaged, or has hardly a sound", "payload"
        )
    if not np.isfinite(samples).all():
        raise CallError("bad_picture", "the sound has samples that are no numbers", "payload")
    return np.clip(samples, -1, 1, out=samples)


def rewritten(header: SoundHeader, data: memoryview) -> bytes:
    """A file of the same sound, with nothing else in it. Raises BadSound."""
    match header.kind:
        case "wav":
            body = data[header.start : header.end]
            fmt = struct.pack("<4sI", b"fmt ", len(header.info)) + header.info
            chunks = b"".join((b"WAVE", fmt, struct.pack("<4sI", b"data", len(body)), body))
            return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks
        case "flac":
            block = struct.pack(">I", _FLAC_LAST_BLOCK | len(header.info)) + header.info
            return b"".join((b"fLaC", block, data[header.start : header.end]))
        case "mp3":
            return mp3_frames(data, header)


def _decoded(context: Any, file: bytes) -> np.ndarray | None:
    buffer = (ctypes.c_uint8 * len(file)).from_buffer_copy(file)
    bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(context, buffer, len(file), False)
    if not bitmap:
        return None
    try:
        if not mtmd.mtmd_bitmap_is_audio(bitmap):
            return None
        n_bytes = mtmd.mtmd_bitmap_get_n_bytes(bitmap)
        if not n_bytes:
            return None
        found = ctypes.cast(mtmd.mtmd_bitmap_get_data(bitmap), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(found, (n_bytes // 4,)).copy()
    finally:
        mtmd.mtmd_bitmap_free(bitmap)
