"""No body that a client can write is a fault of this node: every refusal is a 4xx that says what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Stand, serve_node
from deadlines import DEADLINE_S
from hostile_bodies import BODIES, VALUES, exchanged, hostile, operations, places_of, written
from hypothesis import HealthCheck, given, settings
from long_runs import part_or_whole

from swarmllm.api.http.openapi import Operation

JSON_TYPE = {"Content-Type": "application/json"}
STEP = part_or_whole(8, 4)
"""Every place gets an eighth of the values (a quarter in a long run), the next place the next eighth."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub is asked whatever a body says: an answer of 502 would be the hub's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


async def complaint(stand: Stand, operation: Operation, data: bytes) -> str | None:
    """What is wrong with the answer."""
    path = operation.path.replace("{name}", "guide")
    method = operation.method.upper()
    answer = await stand.http.request(method, path, content=data, headers=JSON_TYPE, timeout=DEADLINE_S)
    if answer.status_code < 400:
        return None
    try:
        error: Any = answer.json()["error"]
    except (ValueError, KeyError):
        return f"{answer.status_code} without an error: {answer.text[:200]}"
    message = error["message"] if isinstance(error, dict) else error
    if answer.status_code >= 500:
        return f"{answer.status_code}: {answer.text[:200]}"
    return None if message else "no message"


def test_every_body_of_the_api_has_an_example() -> None:
    assert set(BODIES) == {operation.path for operation in operations()}


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.path)
async def test_every_field_refuses_what_it_cannot_be(
    tmp_path: Path, operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    """Values of the list in every place of an example, and in every field there is."""
    wrong: dict[str, str] = {}
    async with serve_node(tmp_path) as stand:
        assert await complaint(stand, operation, written(BODIES[operation.path])) is None
        for i, path in enumerate(places_of(operation)):
            for value in VALUES[i % STEP :: STEP]:
                data = written(exchanged(BODIES[operation.path], path, value))
                if found := await complaint(stand, operation, data):
                    wrong[f"{path} {value!r:.60}"] = found
    assert not wrong, "\n".join(f"{what}: {found}" for what, found in wrong.items())
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"\xff",
        b"null",
        b"1",
        b'"',
        b"{" * 100_000,
        b"[" * 60_000,
        b'{"model":"guide",}',
        b"\xef\xbb\xbf{}",
    ],
)
async def test_what_is_no_json_object_is_refused(tmp_path: Path, data: bytes) -> None:
    async with serve_node(tmp_path) as stand:
        for operation in operations():
            path = operation.path.replace("{name}", "guide")
            answer = await stand.http.request(operation.method.upper(), path, content=data, headers=JSON_TYPE)
            may_be_empty = operation.is_body_optional and not data
            assert answer.status_code in ((200, 400, 409, 413) if may_be_empty else (400, 413)), path


def test_several_wrong_values_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Against one server for all examples."""
    drawn: list[tuple[Operation, bytes]] = []

    def draw(operation: Operation) -> None:
        @settings(max_examples=part_or_whole(10, 30), suppress_health_check=list(HealthCheck), database=None)
        @given(hostile(operation))
        def remember(data: bytes) -> None:
            drawn.append((operation, data))

        remember()

    async def main() -> list[str]:
        async with serve_node(tmp_path) as stand:
            found = [(await complaint(stand, operation, data), data[:300]) for operation, data in drawn]
        return [f"{what}: {data!r}" for what, data in found if what]

    for operation in operations():
        draw(operation)
    wrong = trio.run(main)
    assert not wrong, "\n".join(wrong)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_wrong_field_is_named(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        for field, value in {
            "max_tokens": "x",
            "messages[0].role": 5,
            "temperature": "hot",
            "seed": [],
        }.items():
            body: Any = {"model": "guide", "messages": [{"role": "user", "content": "hi"}]}
            if field.startswith("messages"):
                body["messages"][0]["role"] = value
            else:
                body[field] = value
            answer = await stand.http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    async with serve_node(tmp_path / "strict", strict=True) as stand:
        unknown = msgspec.json.encode(
            {"model": "guide", "messages": [{"role": "user", "content": "a"}], "no such field": 1}
        )
        answer = await stand.http.post("/v1/chat/completions", content=unknown, headers=JSON_TYPE)
        assert answer.json()["error"]["param"] == "no such field"
