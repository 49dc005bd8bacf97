"""Pictures in the bodies of all dialects: where their markers stand, and how they are refused."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_fakes import serve_node
from picture_files import FILES, data_url, gif, jpeg, png

from swarmllm.api.anthropic.messages import MessagesRequest
from swarmllm.api.anthropic.messages import _call as anthropic_call
from swarmllm.api.http.errors import BRACKETS_MAX, decode_body
from swarmllm.api.http.fields import LARGE_BYTES
from swarmllm.api.ollama.endpoints import OllamaMessage
from swarmllm.api.ollama.endpoints import _message as ollama_message
from swarmllm.api.openai.chat_request import chat_call
from swarmllm.api.openai.pictures import PIECE, RequestPictures
from swarmllm.api.openai.responses_request import ResponsesRequest, responses_call
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.config import ApiTable, Config
from swarmllm.errors import InvalidRequest
from swarmllm.pictures import PICTURES_MAX, Picture
from swarmllm_proto.limits import PICTURE_BYTES_MAX

JSON_TYPE = {"Content-Type": "application/json"}
ONE, TWO = png(3, 2), jpeg(30, 20)
Said = tuple[list[str], RequestPictures]
"""The text of each message, and the pictures."""


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def texts_of(messages: list[Any]) -> list[str]:
    return [str(message["content"]) for message in messages]


def openai_says(content: list[Any], **more: Any) -> Said:
    body = {"model": "m", "messages": [{"role": "user", "content": content}, *more.get("others", ())]}
    call = chat_call(decode_body(msgspec.json.encode(body), ChatRequest))
    return texts_of(call.messages), call.pictures


def picture_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)} | more}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def responses_says(content: list[Any]) -> Said:
    body = {"model": "m", "input": [{"role": "user", "content": content}]}
    pictures = RequestPictures()
    call, _ = responses_call(decode_body(msgspec.json.encode(body), ResponsesRequest), [], pictures)
    assert call.pictures is pictures
    return texts_of(call.messages), pictures


def anthropic_says(content: list[Any]) -> Said:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    call = anthropic_call(decode_body(msgspec.json.encode(body), MessagesRequest))
    return texts_of(call.messages), call.pictures


def block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": encoded(data)}
    return {"type": "image", "source": source}


def ollama_says(images: list[str], content: str = "What?", role: str = "user") -> Said:
    pictures = RequestPictures()
    message = ollama_message(
        OllamaMessage(role=role, content=content, images=images), "messages[0]", pictures
    )
    return [str(message.content)], pictures


def shown(said: Said) -> list[list[str | tuple[int, int]]]:
    """Of each message its pieces: texts, and sizes of pictures."""
    texts, pictures = said
    parsed = pictures.parse()
    lines = "\x00".join(texts)
    pieces = [
        part if isinstance(piece, str) else (piece.width, piece.height)
        for piece in parsed.split(lines)
        for part in (re.split("(\x00)", piece) if isinstance(piece, str) else [""])
    ]
    messages: list[list[str | tuple[int, int]]] = [[]]
    for piece in pieces:
        if piece == "\x00":
            messages.append([])
        elif piece:
            messages[-1].append(piece)
    return messages


@pytest.mark.parametrize(
    "said",
    [
        lambda: openai_says(
            [text_part("A"), picture_part(ONE, detail="auto"), text_part("B"), picture_part(TWO)]
        ),
        lambda: responses_says(
            [
                {"type": "input_text", "text": "A"},
                {"type": "input_image", "image_url": data_url(ONE), "detail": "auto"},
                {"type": "input_text", "text": "B"},
                {"type": "input_image", "image_url": data_url(TWO)},
            ]
        ),
        lambda: anthropic_says([text_part("A"), block(ONE), text_part("B"), block(TWO)]),
    ],
    ids=["chat", "responses", "anthropic"],
)
def test_pictures_stand_between_the_parts_of_a_message(said: Callable[[], Said]) -> None:
    assert shown(said()) == [["A", (3, 2), "B", (30, 20)]]


def test_ollamas_pictures_stand_before_the_text() -> None:
    assert shown(ollama_says([encoded(ONE), encoded(TWO)])) == [[(3, 2), (30, 20), "What?"]]
    assert shown(ollama_says([], "plain")) == [["plain"]]


def test_a_tools_result_may_be_a_picture() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text_part("here:"), block(TWO)]}
    assert shown(anthropic_says([result, text_part("A"), block(ONE)])) == [
        ["here:", (30, 20)],
        ["A", (3, 2)],
    ]
    tool = {"role": "tool", "tool_call_id": "t", "content": [picture_part(TWO)]}
    assert shown(openai_says([picture_part(ONE)], others=[tool])) == [[(3, 2)], [(30, 20)]]


def test_the_bytes_tell_the_kind_whatever_the_client_says() -> None:
    for kind, data in FILES.values():
        for said in (
            anthropic_says([block(data, "image/webp")]),
            openai_says([{"type": "image_url", "image_url": {"url": data_url(data, "image/tiff")}}]),
            openai_says([{"type": "image_url", "image_url": {"url": f"DATA:;BASE64,{encoded(data)}"}}]),
            ollama_says([encoded(data)]),
        ):
            (picture,) = said[1].parse().by_marker.values()
            assert (picture.kind, picture.data) == (kind, data)


def test_base64_may_have_lines_and_any_length() -> None:
    for n in (0, 1, 2, PIECE, PIECE + 1):
        data = png() + bytes(n)
        for text in (encoded(data), base64.encodebytes(data).decode(), encoded(data) + "\r\n"):
            (picture,) = ollama_says([text])[1].parse().by_marker.values()
            assert picture.data == data


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            lambda: openai_says([text_part("A"), picture_part(b"<svg/>")]),
            "messages[0].content[1].image_url.url",
        ),
        (lambda: anthropic_says([block(b"<svg/>")]), "messages[0].content[0].source.data"),
        (
            lambda: anthropic_says([block(ONE), block(png(60_000, 60_000, is_whole=False))]),
            "messages[0].content[1].source.data",
        ),
        (
            lambda: responses_says([{"type": "input_image", "image_url": data_url(gif(0, 1))}]),
            "input[0].content[0].image_url",
        ),
        (lambda: ollama_says([encoded(ONE), "!!!!"]), "messages[0].images[1]"),
        (lambda: ollama_says([encoded(ONE)[:-1]]), "messages[0].images[0]"),
        (lambda: ollama_says(["é" * 8]), "messages[0].images[0]"),
        (lambda: ollama_says([""]), "messages[0].images[0]"),
        (lambda: ollama_says(["A" * 4 * (PICTURE_BYTES_MAX // 3 + 1)]), "messages[0].images[0]"),
    ],
)
def test_what_is_no_picture_is_refused_by_the_field_it_is_in(said: Callable[[], Said], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        said()[1].parse()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            lambda: openai_says([{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]),
            "messages[0].content[0].image_url.url",
        ),
        (
            lambda: openai_says([{"type": "image_url", "image_url": {"url": "data:image/png,hello"}}]),
            "messages[0].content[0].image_url.url",
        ),
        (
            lambda: openai_says(
                [text_part("A")], others=[{"role": "system", "content": [picture_part(ONE)]}]
            ),
            "messages[1].content[0].type",
        ),
        (
            lambda: openai_says(
                [text_part("A")], others=[{"role": "assistant", "content": [picture_part(ONE)]}]
            ),
            "messages[1].content[0].type",
        ),
        (
            lambda: openai_says([picture_part(ONE)] * (PICTURES_MAX + 1)),
            f"messages[0].content[{PICTURES_MAX}].image_url.url",
        ),
        (
            lambda: anthropic_says(
                [{"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/latest"}}]
            ),
            "messages[0].content[0].source.url",
        ),
        (
            lambda: anthropic_says([{"type": "image", "source": {"type": "file", "file_id": "f"}}]),
            "messages[0].content[0].source",
        ),
        (lambda: anthropic_says([{"type": "image"}]), "messages[0].content[0].source"),
        (lambda: responses_says([{"type": "input_image", "file_id": "f"}]), "input[0].content[0].image_url"),
        (lambda: ollama_says([encoded(ONE)], role="assistant"), "messages[0].images"),
    ],
)
def test_what_is_not_taken_is_refused_before_anything_is_read(said: Callable[[], Said], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        said()
    assert caught.value.field == field


def test_markers_cannot_be_guessed_or_repeated() -> None:
    first, second = (openai_says([picture_part(ONE), picture_part(ONE)])[1].parse() for _ in range(2))
    assert len({*first.by_marker, *second.by_marker}) == 4


PICTURE = data_url(ONE)
ASKED: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [text_part("A"), picture_part(ONE)]}]},
        "messages[0].content[1].image_url.url",
    ),
    (
        "/v1/chat/completions/input_tokens",
        {"messages": [{"role": "user", "content": [picture_part(ONE)]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]},
        "input[0].content[0].image_url",
    ),
    (
        "/v1/responses/input_tokens",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]},
        "input[0].content[0].image_url",
    ),
    (
        "/v1/messages",
        {"max_tokens": 5, "messages": [{"role": "user", "content": [block(ONE)]}]},
        "messages[0].content[0].source.data",
    ),
    (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": [block(ONE)]}]},
        "messages[0].content[0].source.data",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "A", "images": [encoded(ONE)]}]},
        "messages[0].images[0]",
    ),
    ("/api/generate", {"prompt": "A", "images": [encoded(ONE)]}, "images[0]"),
    (
        "/completion",
        {"prompt": {"prompt_string": "A <__media__>", "multimodal_data": [encoded(ONE)]}},
        "prompt.multimodal_data[0]",
    ),
    ("/apply-template", {"messages": [{"role": "user", "content": [picture_part(ONE)]}]}, "messages[0]"),
]


async def test_a_model_that_takes_no_pictures_says_so_in_every_dialect(tmp_path: Path) -> None:
    """OpenAI's client asks again after a 503, so it is none."""
    async with serve_node(tmp_path) as stand:
        for path, body, field in ASKED:
            for more in ({}, {"stream": True}):
                answer = await stand.http.post(path, json={"model": "guide"} | body | more)
                assert answer.status_code == 400, path
                assert "guide takes no pictures" in answer.text, path
                assert field in answer.text, path
        missing = await stand.http.post("/v1/chat/completions", json={"model": "gpt-9"} | ASKED[0][1])
        assert missing.status_code == 404
        assert not stand.pipelines.calls


@pytest.mark.parametrize("detail", [None, "auto", "low", "high", "original"])
def test_low_detail_scales_a_picture_down_and_any_other_leaves_it(detail: str | None) -> None:
    seen = {"type": "input_image", "image_url": data_url(ONE), "detail": detail}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [seen]}
    body = {"model": "m", "input": [{"role": "user", "content": [seen]}, call, output]}
    pictures = RequestPictures()
    responses_call(decode_body(msgspec.json.encode(body), ResponsesRequest), [], pictures)
    _, of_chat = openai_says([picture_part(ONE, detail=detail)])
    found = [*pictures.parse().by_marker.values(), *of_chat.parse().by_marker.values()]
    expected = 512 if detail == "low" else 0
    assert [each.side_max for each in found if isinstance(each, Picture)] == [expected] * 3


async def test_markers_of_llamacpp_are_as_many_as_its_pictures(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        for text, n in (("A", 1), ("<__media__>", 0), ("<__media__><__media__>", 1)):
            prompt = {"prompt_string": text, "multimodal_data": [encoded(ONE)] * n}
            answer = await stand.http.post("/completion", json={"model": "guide", "prompt": prompt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt.multimodal_data")
        prompt = {"prompt_string": "A", "multimodal_data": []}
        answer = await stand.http.post("/completion", json={"model": "guide", "prompt": prompt})
        assert answer.status_code == 200
        assert answer.json()["prompt"] == "A"
        assert stand.pipelines.calls[0].prompt.text == "A"


LARGE = Config(api=ApiTable(port=0))


async def test_a_body_of_countless_parts_is_refused(tmp_path: Path) -> None:
    async with serve_node(tmp_path, config=LARGE) as stand:
        for parts, status in ((b"[]," * (BRACKETS_MAX // 2), 200), (b"{}," * (BRACKETS_MAX + 1), 400)):
            schema = b'"tools":[{"type":"function","function":{"name":"f","parameters":{"a":[%s1]}}}]' % parts
            data = b'{"model":"guide","messages":[{"role":"user","content":"hi"}],%s}' % schema
            answer = await stand.http.post(ASKED[0][0], content=data, headers=JSON_TYPE)
            assert answer.status_code == status
        assert "lists and objects" in answer.json()["error"]["message"]


async def test_a_large_body_is_read_like_a_small_one(tmp_path: Path) -> None:
    """In a thread, where its unknown fields are told and its mistakes are named as well."""
    url = data_url(png() + bytes(LARGE_BYTES))
    part = {"type": "image_url", "image_url": {"url": url, "hue": 1}}
    body: dict[str, Any] = {"model": "guide", "messages": [{"role": "user", "content": [part]}]}
    async with serve_node(tmp_path, config=LARGE) as stand:
        answer = await stand.http.post(ASKED[0][0], json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, ASKED[1][2])
        assert answer.headers["x-swarm-ignored"] == "messages[].content[].image_url.hue"
        answer = await stand.http.post(ASKED[0][0], json=body | {"n": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
