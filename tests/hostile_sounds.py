"""Files that are made to break a decoder of sounds, and what one process of an encoder makes of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
from blake3 import blake3
from sound_models import float_wav, sound_file, tones, wav_of

from swarmllm.errors import InvalidRequest
from swarmllm.models.projector import Projector
from swarmllm.sounds import Sound
from swarmllm.workerpool import ModelFile, WorkerPool


def unchecked(data: bytes, kind: str) -> Sound:
    """As if a header had been read in it."""
    return Sound(data, kind, None, blake3(data).hexdigest())  # type: ignore[arg-type]


def damaged_sounds(n: int, seed: int = 0) -> Iterator[Sound]:
    """Of every kind in turn: bytes exchanged, removed, repeated or cut off, half of them near the header."""
    rng = np.random.default_rng(seed)
    whole = {
        "wav": wav_of(tones(0.05)),
        "mp3": sound_file("sweep-22050-mono.mp3").data,
        "flac": sound_file("sweep-22050-stereo.flac").data,
    }
    for index in range(n):
        kind = tuple(whole)[index % 3]
        data = bytearray(whole[kind])
        if index % 5 == 0:
            del data[int(rng.integers(1, len(data))) :]
        for _ in range(int(rng.integers(1, 8))):
            end = len(data) if index % 2 else min(len(data), 100)
            at = int(rng.integers(0, end))
            match int(rng.integers(0, 4)):
                case 0:
                    del data[at : at + int(rng.integers(1, 5))]
                case 1:
                    data[at:at] = data[at : at + int(rng.integers(1, 40))]
                case _:
                    data[at : at + 1] = bytes([int(rng.integers(0, 256))])
            data = data or bytearray(b"\0")
        yield unchecked(bytes(data), kind)


async def n_refused(pool: WorkerPool, model: ModelFile, mmproj: Projector, n: int, seed: int = 0) -> int:
    """How many of `n` damaged sounds are refused; the others are taken for what they sound like. Raises what
    else becomes of them."""
    refused = 0
    for sound in damaged_sounds(n, seed):
        try:
            encoded = await pool.encode_picture(model, mmproj, sound, is_kept=False)
            assert np.isfinite(encoded.rows).all()
        except InvalidRequest:
            refused += 1
    return refused


def lying_sounds() -> dict[str, tuple[Sound, str]]:
    """Small files whose headers say what is not so, or name what is not there, and why each is refused."""
    wav, flac = bytearray(wav_of(tones(0.05))), sound_file("sweep-22050-stereo.flac").data
    mp3 = sound_file("sweep-22050-mono.mp3").data
    longer = bytes(wav[:40]) + struct.pack("<I", 2**31) + bytes(wav[44:])
    compressed = bytes(wav[:20]) + struct.pack("<H", 0x11) + bytes(wav[22:])
    flat = bytes(wav[:22]) + struct.pack("<HIIHH", 0, 16000, 0, 0, 16) + bytes(wav[36:])
    endless = flac[:18] + struct.pack(">Q", 22050 << 44 | 1 << 41 | 15 << 36 | (2**36 - 1)) + flac[26:]
    slow = flac[:18] + struct.pack(">Q", 1 << 44 | 1 << 41 | 15 << 36 | 400) + flac[26:]
    unknown = flac[:18] + struct.pack(">Q", 22050 << 44 | 1 << 41 | 15 << 36) + flac[26:]
    silence = bytes.fromhex("fff348c4") + bytes(140)
    nan = float_wav(np.full(4000, np.nan, np.float32))
    return {
        "WAV of 2 GiB": (unchecked(longer, "wav"), "ends early"),
        "WAV of compressed samples": (unchecked(compressed, "wav"), "this kind of WAV is not read"),
        "WAV without channels": (unchecked(flat, "wav"), "header of the WAV is damaged"),
        "WAV of one sample": (unchecked(wav_of(tones(0.05)[:1]), "wav"), "hardly a sound"),
        "WAV of NaN": (unchecked(nan, "wav"), "no numbers"),
        "WAV behind an MP3's name": (unchecked(bytes(wav), "mp3"), "this is a wav file, not mp3"),
        "FLAC of 36 days": (unchecked(endless, "flac"), "longer than 600 s"),
        "FLAC of one sample a second": (unchecked(slow, "flac"), "1 samples a second"),
        "FLAC that says no length": (unchecked(unknown, "flac"), "does not say how long it is"),
        "FLAC header alone": (unchecked(flac[:86], "flac"), "ends within its header"),
        "MP3 tag that points beyond": (
            unchecked(b"ID3\4\0\0\x7f\x7f\x7f\x7f" + mp3, "mp3"),
            "does not begin",
        ),
        "MP3 of 11 minutes": (unchecked(silence * 28_000, "mp3"), "longer than 600 s"),
        "MP3 and junk": (unchecked(mp3 + b"junk" * 9, "mp3"), "damaged at byte"),
        "MP3 frames in a WAV's clothes": (
            unchecked(b"RIFF\0\0\0\0WAVEjunk\0\0\0\0" + mp3 * 4, "wav"),
            "ends within its header|chunks before its sound",
        ),
    }
