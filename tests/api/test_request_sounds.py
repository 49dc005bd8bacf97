"""Sounds in the bodies of the dialects that have them, and how they are refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from api_fakes import serve_node
from sound_models import sound_file, tones, wav_of
from test_request_pictures import encoded, openai_says, picture_part, responses_says, text_part

from swarmllm.errors import InvalidRequest
from swarmllm.pictures import Picture
from swarmllm.sounds import Sound
from tests.picture_files import png

WAV, MP3 = wav_of(tones(0.1)), sound_file("sweep-22050-mono.mp3").data


def sound_part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": kind}}


@pytest.mark.parametrize("says", [openai_says, responses_says])
def test_a_sound_stands_where_its_part_stood(says: Any) -> None:
    text = {"type": "input_text" if says is responses_says else "text", "text": "What is said?"}
    (said,), asked = says([text, sound_part(WAV), sound_part(MP3, "mp3")])
    found = asked.parse().split(said)
    assert [each if isinstance(each, str) else each.kind for each in found] == ["What is said?", "wav", "mp3"]
    assert isinstance(found[1], Sound)
    assert found[1].data == WAV
    assert asked.needs == {"sound"}


def test_pictures_and_sounds_may_stand_beside_each_other() -> None:
    (said,), asked = openai_says([picture_part(png()), sound_part(WAV), text_part("Both?")])
    first, second, text = asked.parse().split(said)
    assert (type(first), type(second), text) == (Picture, Sound, "Both?")
    assert asked.needs == {"picture", "sound"}


def test_the_bytes_tell_the_kind_whatever_the_client_says() -> None:
    (said,), asked = openai_says([sound_part(MP3, "flac")])
    (found,) = asked.parse().split(said)
    assert isinstance(found, Sound)
    assert found.kind == "mp3"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(png()), "none of WAV, MP3 and FLAC"),
        ("Ä", "this is not base64"),
        ("", "the sound is empty"),
        (encoded(b"OggS" + bytes(50)), "none of WAV, MP3 and FLAC"),
        (base64.b64encode(bytes(2**25 + 1)).decode(), "larger than 32 MiB"),
    ],
)
def test_what_is_no_sound_is_refused_by_its_field(data: str, why: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    _, asked = openai_says([text_part("A"), part])
    with pytest.raises(InvalidRequest, match=why) as caught:
        asked.parse()
    assert caught.value.field == "messages[0].content[1].input_audio.data"


async def test_a_model_that_takes_no_sounds_says_so(tmp_path: Path) -> None:
    asked = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [sound_part(WAV)]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [sound_part(WAV)]}]},
    }
    async with serve_node(tmp_path) as stand:
        for path, body in asked.items():
            answer = await stand.http.post(path, json={"model": "guide"} | body)
            assert (answer.status_code, "guide takes no sounds" in answer.text) == (400, True), path
            assert "content[0].input_audio.data" in answer.text
            missing = {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "ogg"}}
            key = next(iter(body))
            odd = {"model": "guide", key: [{"role": "user", "content": [missing]}]}
            assert (await stand.http.post(path, json=odd)).status_code == 400
        system = {"messages": [{"role": "system", "content": [sound_part(WAV)]}]}
        answer = await stand.http.post("/v1/chat/completions", json={"model": "guide"} | system)
        assert "only text parts" in answer.text
