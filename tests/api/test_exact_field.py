"""`exact` in every dialect that has it, and in a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_fakes import serve_node

HELLO = [{"role": "user", "content": "hello"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "guide", "messages": HELLO, "exact": True},
    "/v1/completions": {"model": "guide", "prompt": "hello", "exact": True},
    "/completion": {"model": "guide", "prompt": "hello", "exact": True},
    "/v1/responses": {"model": "guide", "input": "hello", "exact": True},
    "/v1/messages": {"model": "guide", "messages": HELLO, "max_tokens": 7, "exact": True},
    "/api/chat": {"model": "guide", "messages": HELLO, "stream": False, "options": {"exact": True}},
    "/api/generate": {"model": "guide", "prompt": "hello", "stream": False, "options": {"exact": True}},
}


def without(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("exact", "options")}


@pytest.mark.parametrize("path", ASKS)
async def test_it_reaches_the_sampling_and_the_answer_says_so(tmp_path: Path, path: str) -> None:
    async with serve_node(tmp_path) as stand:
        for body, is_exact in ((ASKS[path], True), (without(ASKS[path]), False)):
            answer = await stand.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert stand.pipelines.calls[-1].sampling.exact is is_exact
            assert answer.json()["swarm"]["apart"] is is_exact
            assert "x-swarm-ignored" not in answer.headers


async def test_vectors_can_be_asked_for_exactly(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        body = {"model": "guide", "input": ["one", "two"]}
        for fields in ({}, {"exact": False}, {"exact": True}):
            assert (await stand.http.post("/v1/embeddings", json=body | fields)).status_code == 200
        assert stand.pipelines.exact_rows == [False, False, False, False, True, True]
        preset = {"sampling": {"exact": True}}
        await stand.http.post("/api/admin/models/guide/preset", json=preset)
        for fields in ({}, {"exact": False}):
            await stand.http.post("/v1/embeddings", json={"model": "guide", "input": "one"} | fields)
        assert stand.pipelines.exact_rows[6:] == [True, False]


async def test_a_preset_can_ask_for_it_and_a_request_can_refuse_it(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.http.post("/api/admin/models/guide/alias", json={"name": "judge"})
        preset = {"sampling": {"exact": True}}
        assert (await stand.http.post("/api/admin/models/judge/preset", json=preset)).json() == preset
        body = {"model": "judge", "messages": HELLO}
        await stand.http.post("/v1/chat/completions", json=body)
        assert stand.pipelines.calls[-1].sampling.exact is True
        await stand.http.post("/v1/chat/completions", json=body | {"exact": False})
        assert stand.pipelines.calls[-1].sampling.exact is False


async def test_anything_but_a_boolean_is_refused_by_name(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        body = {"model": "guide", "messages": HELLO, "exact": "yes"}
        answer = await stand.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "exact"
