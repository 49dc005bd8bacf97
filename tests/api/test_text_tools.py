"""llama.cpp's helpers over HTTP."""

from __future__ import annotations

from pathlib import Path

import trio
from api_fakes import Script, Stand, serve_node

from swarmllm.models import LayerRange


async def refusal(stand: Stand, path: str, body: dict[str, object]) -> tuple[int, str]:
    answer = await stand.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]["param"]


async def test_text_becomes_tokens_and_text_again(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        plain = (await stand.http.post("/tokenize", json={"content": "hi"})).json()
        special = (await stand.http.post("/tokenize", json={"content": "hi", "add_special": True})).json()
        back = (await stand.http.post("/detokenize", json=plain | {"model": "guide"})).json()
    assert plain == {"tokens": list(b"hi")}
    assert special == {"tokens": [1, *b"hi"]}
    assert back == {"content": "hi"}


async def test_a_conversation_becomes_the_text_the_model_reads(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        answer = await stand.http.post("/apply-template", json={"messages": messages})
    assert answer.json() == {"prompt": "<system>Be kind.<user>hi"}


async def test_props_tell_what_a_client_can_count_on(tmp_path: Path) -> None:
    async with serve_node(tmp_path, n_ctx=1024, n_slots=3) as stand:
        props = (await stand.http.get("/props", params={"model": "guide"})).json()
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["total_slots"] == 3
    assert props["model_alias"] == "guide"
    assert props["model_path"].endswith("guide.gguf")


async def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        assert await refusal(stand, "/tokenize", {"content": "hi"}) == (400, "model")
        entry, _ = await stand.node.models.resolve("guide", None)
        await stand.node.models.load(
            entry, LayerRange(0, 4), lambda done, total: None, lambda done, total: None
        )
        assert await refusal(stand, "/tokenize", {"content": "hi"}) == (400, "model")
        guide = {"model": "guide"}
        hi = guide | {"content": "hi"}
        assert await refusal(stand, "/tokenize", hi | {"with_pieces": True}) == (400, "with_pieces")
        assert await refusal(stand, "/tokenize", hi | {"parse_special": False}) == (400, "parse_special")
        assert await refusal(stand, "/detokenize", guide | {"tokens": [10**6]}) == (400, "tokens")
        assert await refusal(stand, "/detokenize", guide | {"tokens": [-1]}) == (400, "tokens[0]")
        assert await refusal(stand, "/apply-template", guide | {"messages": []}) == (400, "messages")
        assert await refusal(stand, "/detokenize", {"model": "gpt-9", "tokens": []}) == (404, "model")
        assert (await stand.http.get("/props", params={"model": "gpt-9"})).status_code == 404


async def test_slots_tell_who_is_served_and_never_what_was_said(tmp_path: Path) -> None:
    async with serve_node(tmp_path, max_concurrent_requests=3) as stand:
        assert [slot["is_processing"] for slot in (await stand.http.get("/slots")).json()] == [False] * 3
        stand.pipelines.script = Script(texts=["one", "two"], hold_after=1)
        body = {"model": "guide", "messages": [{"role": "user", "content": "a secret"}], "stream": True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: stand.http.post("/v1/chat/completions", json=body))
            await stand.pipelines.started.wait()
            answer = await stand.http.get("/slots")
            nursery.cancel_scope.cancel()
    first, *others = answer.json()
    assert (first["is_processing"], first["model"], first["state"]) == (True, "guide", "decode")
    assert [slot["is_processing"] for slot in others] == [False, False]
    assert "secret" not in answer.text
