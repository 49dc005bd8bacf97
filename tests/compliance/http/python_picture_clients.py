"""Python clients of three APIs show the pictures of the folder SWARMLLM_PICTURES to the model at SWARMLLM_URL
which several nodes run; see test_shown_pictures."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

URL = os.environ["SWARMLLM_URL"].rstrip("/")
MODEL = os.environ["SWARMLLM_MODEL"]
QUESTION = "What is this?"
PICTURES = sorted(Path(os.environ["SWARMLLM_PICTURES"]).iterdir())
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif"}


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def data_url(path: Path) -> str:
    return f"data:{KINDS[path.suffix]};base64,{encoded(path)}"


def by_openai(ai: openai.OpenAI, *shown: Path) -> Any:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(path)}} for path in shown
    ]
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return ai.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)


@pytest.fixture(scope="module", params=PICTURES, ids=lambda path: path.suffix[1:])
def picture(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def ai() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(ai: openai.OpenAI, picture: Path) -> str:
    """What every client should read."""
    answer = by_openai(ai, picture)
    assert answer.usage.prompt_tokens > by_openai(ai).usage.prompt_tokens
    return str(answer.choices[0].message.content)


def test_openai_responses(ai: openai.OpenAI, picture: Path, expected: str) -> None:
    items: Any = [
        {"type": "input_image", "image_url": data_url(picture), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    asked: Any = [{"role": "user", "content": items}]
    options: Any = {"model": MODEL, "input": asked, "temperature": 0, "max_output_tokens": 12}
    assert ai.responses.create(**options).output_text == expected
    with ai.responses.stream(**options) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected


def test_anthropic(picture: Path, expected: str) -> None:
    source = {"type": "base64", "media_type": KINDS[picture.suffix], "data": encoded(picture)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": blocks}]}
    with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
        with client.messages.stream(**asked, max_tokens=12, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == expected
        assert client.messages.count_tokens(**asked).input_tokens > 0


def test_ollama(picture: Path, expected: str) -> None:
    client = ollama.Client(host=URL)
    options = {"temperature": 0, "num_predict": 12}
    message = {"role": "user", "content": QUESTION, "images": [picture]}
    parts = client.chat(MODEL, messages=[message], options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == expected
    assert client.generate(MODEL, QUESTION, images=[picture], options=options).response == expected
    assert "vision" in (client.show(MODEL).capabilities or [])


def test_several_pictures_and_a_second_turn(ai: openai.OpenAI) -> None:
    both = by_openai(ai, *PICTURES[:2])
    assert both.usage.prompt_tokens > by_openai(ai, PICTURES[0]).usage.prompt_tokens
    again = by_openai(ai, *PICTURES[:2])
    assert again.choices[0].message.content == both.choices[0].message.content


def test_what_is_no_picture_is_a_bad_request(ai: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "drawing.png"
    path.write_bytes(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    with pytest.raises(openai.BadRequestError):
        by_openai(ai, path)
