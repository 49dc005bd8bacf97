"""llama.cpp's helpers over HTTP."""

from __future__ import annotations

import json
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


async def test_completion_answers_in_llama_cpps_words(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for path in ("/completion", "/completions"):
            answer = (await stand.http.post(path, json={"prompt": "Once", "n_predict": -1})).json()
            assert (answer["content"], answer["stop"], answer["stop_type"]) == ("Hello there.", True, "eos")
            assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (3, 7)
            assert {"prompt_n": 3, "cache_n": 4, "predicted_n": 3, "predicted_ms": 500.0}.items() <= (
                answer["timings"].items()
            )
        (call, _) = stand.pipelines.calls
        assert call.prompt.text == "Once"
        stand.pipelines.script = Script(finish_reason="length")
        streamed = (await stand.http.post("/completion", json={"prompt": [1, 72], "stream": True})).text
        events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
        assert "".join(event["content"] for event in events) == "Hello there."
        assert [event["stop"] for event in events].count(True) == 1
        assert events[-1]["stop_type"] == "limit"
        stand.pipelines.script = Script(stop_sequence="x")
        stopped = (await stand.http.post("/completion", json={"prompt": "Once"})).json()
        assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "x")


async def test_completion_refuses_by_name(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for fields, name in (
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"n_predict": 0}, "n_predict"),
            ({"n_predict": 1, "max_tokens": 2}, "n_predict"),
            ({"n_probs": 3}, "n_probs"),
            ({"grammar": "root ::= x", "json_schema": {"type": "object"}}, "grammar"),
        ):
            assert await refusal(stand, "/completion", {"prompt": "a", **fields}) == (400, name)


async def test_paths_without_v1_and_requests_without_a_model(tmp_path: Path) -> None:
    asked: dict[str, dict[str, object]] = {
        "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/responses": {"input": "hi"},
        "/embeddings": {"input": "hi"},
    }
    async with serve_node(tmp_path) as stand:
        assert await refusal(stand, "/v1/chat/completions", asked["/chat/completions"]) == (400, "model")
        await stand.load_guide()
        for path, body in asked.items():
            for prefix in ("", "/v1"):
                answer = await stand.http.post(prefix + path, json=body)
                assert (answer.status_code, answer.json()["model"]) == (200, "guide")
        assert (await stand.http.get("/models")).json() == (await stand.http.get("/v1/models")).json()


async def test_answers_have_timings_and_a_fingerprint(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        for path, body in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": "hi"},
        }.items():
            whole = (await stand.http.post(path, json={"model": "guide"} | body)).json()
            assert whole["system_fingerprint"].startswith("swarmllm-")
            assert whole["timings"]["predicted_per_second"] == 6.0
            streamed = await stand.http.post(path, json={"model": "guide", "stream": True} | body)
            last = json.loads(streamed.text.split("\n\n")[-3].removeprefix("data: "))
            assert last["timings"] == whole["timings"]


async def test_tokens_of_a_chat_are_counted_without_an_answer(tmp_path: Path) -> None:
    """The pool makes a token of each byte of the messages, and one before them."""
    async with serve_node(tmp_path) as stand:
        counts = []
        for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
            for text in ("hi", "hi you"):
                body = {"model": "guide", "messages": [{"role": "user", "content": text}]}
                counts.append((await stand.http.post(path, json=body)).json()["input_tokens"])
        refused = await stand.http.post("/chat/completions/input_tokens", json={"model": "guide"})
        assert stand.pipelines.calls == []
    assert counts[:2] == counts[2:]
    assert counts[1] == counts[0] + len(" you")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_a_chat_takes_llamacpps_short_form_of_a_schema(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 42}}, "required": ["a"]}
    body = {"model": "guide", "messages": [{"role": "user", "content": "hi"}]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    async with serve_node(tmp_path) as stand:
        for form in ({"json_schema": schema}, {"response_format": wanted}):
            assert (await stand.http.post("/v1/chat/completions", json=body | form)).status_code == 200
        short, long = (call.sampling.json_schema for call in stand.pipelines.calls)
        assert short == long != ""
        for other in ({"response_format": wanted}, {"grammar": "root ::= x"}):
            form = {"json_schema": schema} | other
            refused = await stand.http.post("/v1/chat/completions", json=body | form)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "json_schema")
