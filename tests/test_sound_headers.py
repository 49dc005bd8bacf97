"""What the headers of sounds say, and which are refused before anything is decoded."""

from __future__ import annotations

import struct

import pytest
from sound_models import FILES, float_wav, sound_file, tones, wav_of

from swarmllm.errors import InvalidRequest
from swarmllm.pictures import parse_medium
from swarmllm.sounds import Sound, parse_sound
from swarmllm_proto.limits import SOUND_BYTES_MAX, SOUND_SECONDS_MAX
from swarmllm_proto.sound_headers import BadSound, mp3_frames, read_sound_header
from tests.picture_files import FILES as PICTURES


def test_kind_and_length_are_told_by_the_header() -> None:
    wav = parse_sound(wav_of(tones(0.25)), "f")
    assert (wav.kind, wav.seconds) == ("wav", 0.25)
    stereo = parse_sound(wav_of(tones(0.5, rate=44100), 44100, 2), "f")
    assert stereo.seconds == 0.25
    assert parse_sound(float_wav(tones(0.25)), "f").seconds == 0.25
    flac = sound_file("sweep-22050-stereo.flac")
    assert (flac.kind, flac.seconds) == ("flac", 0.5)
    mp3 = sound_file("sweep-44100-stereo.mp3")
    assert (mp3.kind, mp3.seconds) == ("mp3", None)
    header = read_sound_header(mp3.data)
    assert (header.sample_rate, header.n_channels, mp3_frames(mp3.data, header)) == (44100, 2, mp3.data)


def test_a_wav_that_was_written_to_a_pipe_ends_with_its_file() -> None:
    whole = wav_of(tones(0.25))
    streamed = whole[:40] + struct.pack("<I", 0xFFFFFFFF) + whole[44:]
    assert parse_sound(streamed, "f").seconds == 0.25


def test_an_extensible_wav_is_read_by_the_kind_of_samples_that_it_names() -> None:
    whole = wav_of(tones(0.25))
    tail = bytes.fromhex("000000001000800000aa00389b71")
    plain = struct.pack("<HHIIHH", 0xFFFE, 1, 16000, 32000, 2, 16)
    for kind, is_read in ((1, True), (0x55, False)):
        fmt = plain + struct.pack("<HHIH", 22, 16, 4, kind) + tail
        file = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + whole[36:]
        if is_read:
            header = read_sound_header(file)
            assert (header.n_samples, header.info[:2]) == (4000, b"\1\0")
        else:
            with pytest.raises(BadSound, match="this kind of WAV"):
                read_sound_header(file)


@pytest.mark.parametrize(
    "file", [wav_of(tones(0.02)), *(sound_file(each.name).data[:700] for each in sorted(FILES.iterdir()))]
)
def test_what_ends_within_its_header_is_refused(file: bytes) -> None:
    n_read = 0
    for length in range(len(file)):
        try:
            header = read_sound_header(file[:length])
        except BadSound:
            continue
        assert 0 <= header.start <= header.end <= length
        n_read += 1
    assert n_read < len(file)


def test_what_is_too_long_or_too_large_is_refused() -> None:
    whole = wav_of(tones(0.02))
    slow = whole[:24] + struct.pack("<II", 4000, 8000) + whole[32:40]
    n_bytes = 2 * (SOUND_SECONDS_MAX * 4000 + 1)
    with pytest.raises(InvalidRequest, match=f"longer than {SOUND_SECONDS_MAX} s") as caught:
        parse_sound(slow + struct.pack("<I", n_bytes) + bytes(n_bytes), "here")
    assert caught.value.field == "here"
    assert parse_sound(slow + struct.pack("<I", n_bytes - 2) + bytes(n_bytes - 2), "here").seconds == 600
    with pytest.raises(InvalidRequest, match="larger than 32 MiB"):
        parse_sound(whole + bytes(SOUND_BYTES_MAX), "here")
    with pytest.raises(InvalidRequest, match="the sound is empty"):
        parse_sound(b"", "here")


def test_the_first_bytes_tell_pictures_and_sounds_apart() -> None:
    for kind, (_, data) in PICTURES.items():
        medium = parse_medium(data, "f")
        assert not isinstance(medium, Sound), kind
    for file in (wav_of(tones(0.02)), *(each.read_bytes() for each in FILES.iterdir())):
        assert isinstance(parse_medium(file, "f"), Sound)
