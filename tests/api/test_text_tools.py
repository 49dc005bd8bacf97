"""llama.cpp's helpers over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import trio
from api_fakes import Script, Stand, serve_node

from swarmllm.errors import ContextFull
from swarmllm.models import LayerRange
from swarmllm_proto.ipc import InfillTokens, TokenLogprob


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
    assert answer.json() == {"prompt": "<system>Be kind.<user>hi<assistant>"}


async def test_a_template_ends_where_it_is_asked_to(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for fields, prompt in (
            ({}, "<user>hi<assistant>Hel"),
            ({"add_generation_prompt": True}, "<user>hi<assistant>Hel<assistant>"),
            ({"add_generation_prompt": False}, "<user>hi<assistant>Hel"),
            ({"add_generation_prompt": False, "messages": said[:1]}, "<user>hi"),
        ):
            answer = await stand.http.post("/apply-template", json={"messages": said} | fields)
            assert answer.json() == {"prompt": prompt}, fields


async def test_tokens_come_with_their_pieces(tmp_path: Path) -> None:
    """The pool makes a token of each byte, and one before them whose piece is told all the same."""
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        body = {"content": "aé", "with_pieces": True, "add_special": True}
        tokens = (await stand.http.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == [
        {"id": 1, "piece": "\x01"},
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


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


async def test_completion_tells_what_it_was_made_with(tmp_path: Path) -> None:
    asked = {"prompt": "a", "n_predict": 5, "seed": 42, "top_k": 7, "ignore_eos": True, "return_tokens": True}
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        stand.pipelines.script = Script(texts=["one\n", "two"], finish_reason="length")
        whole = (await stand.http.post("/completion", json=asked)).json()
        fields = ["content", "generation_settings/n_predict", "no/such"]
        short = await stand.http.post("/completion", json=asked | {"response_fields": fields})
        none = (await stand.http.post("/completion", json={"prompt": "a", "n_predict": 0})).json()
    assert (whole["tokens"], whole["has_new_line"], whole["prompt"]) == ([100, 101], True, "a")
    # Two tokens of five, and yet at a limit: that of the context.
    assert (whole["truncated"], whole["stop_type"]) == (True, "limit")
    settings = whole["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["top_k"]) == (5, 42, 7)
    assert settings["logit_bias"] == [{"token": 2, "bias": None}, {"token": 3, "bias": None}]
    assert short.json() == {"content": "one\ntwo", "generation_settings/n_predict": 5}
    assert (none["tokens"], none["generation_settings"]["n_predict"]) == ([], 0)
    first, _, last = stand.pipelines.calls
    assert first.sampling.ignore_eos
    assert (last.prompt.is_answered, last.prompt.top_logprobs) == (False, 0)


async def test_completion_answers_several_prompts_in_one_list(tmp_path: Path) -> None:
    prompts = [[1, 72], "hi", {"prompt_string": "you"}, [1, "a", 98, "c"]]
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        answers = (await stand.http.post("/completion", json={"prompt": prompts})).json()
        asked = [(call.prompt.text, call.prompt.tokens) for call in stand.pipelines.calls]
        streamed = (await stand.http.post("/completion", json={"prompt": prompts[1:3], "stream": True})).text
        one = (await stand.http.post("/completion", json={"prompt": [97, "b", 99]})).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt"] for answer in answers] == ["\x01H", "hi", "you", "\x01abc"]
    assert sorted(asked, key=str) == sorted(
        [(None, [1, 72]), ("hi", None), ("you", None), (None, [1, *b"abc"])], key=str
    )
    assert one["prompt"] == "abc"
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
    for index in (0, 1):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in own) == "Hello there."
        assert [event["stop"] for event in own] == [False, False, False, True]
        assert [event["tokens"] for event in own] == [[100], [101], [102], []]


async def test_completion_tells_probabilities_token_by_token(tmp_path: Path) -> None:
    likely = tuple((TokenLogprob(7, -0.5, b"a"), TokenLogprob(8, -1.5, "é".encode()[:1])) for _ in range(3))
    body = {"prompt": "a", "n_probs": 1}
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        stand.pipelines.script = Script(texts=["x", "", "yz"], logprobs=likely)
        whole = (await stand.http.post("/completion", json=body)).json()
        streamed = (await stand.http.post("/completion", json=body | {"stream": True})).text
        assert (
            stand.pipelines.calls[0].sampling.logprobs,
            stand.pipelines.calls[0].sampling.top_logprobs,
        ) == (
            True,
            1,
        )
    assert whole["completion_probabilities"] == 3 * [
        {
            "id": 7,
            "token": "a",
            "bytes": [97],
            "logprob": -0.5,
            "top_logprobs": [{"id": 8, "token": "\ufffd", "bytes": [0xC3], "logprob": -1.5}],
        }
    ]
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
    assert [event["content"] for event in events] == ["x", "yz", ""]
    assert [len(event.get("completion_probabilities", [])) for event in events] == [1, 2, 0]
    assert [event["tokens"] for event in events] == [[100], [101, 102], []]


async def test_biases_come_as_pairs_and_of_texts(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for said in ([[7, 1.5], ["ab", -2], ["99", False]], {"7": 1.5, "ab": -2, "99": -100}):
            answer = await stand.http.post("/completion", json={"prompt": "a", "logit_bias": said})
            assert answer.status_code == 200, answer.text
        never = (-1000.0, -100.0)
        for call, last in zip(stand.pipelines.calls, never, strict=True):
            assert call.sampling.logit_bias == ((7, 1.5), (97, -2.0), (98, -2.0), (99, last))
        chat = {"messages": [{"role": "user", "content": "hi"}], "logit_bias": [[7, False]]}
        assert (await stand.http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert stand.pipelines.calls[-1].sampling.logit_bias == ((7, -1000.0),)
        refused = await refusal(stand, "/v1/chat/completions", chat | {"logit_bias": [["ab", 1]]})
        assert refused == (400, "logit_bias")


async def test_embeddings_take_llamacpps_inputs(tmp_path: Path) -> None:
    parts = {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for given, n_tokens in (
            ({"prompt_string": "hi"}, 3),
            (parts, 12),
            (["hi", parts, [1, "ab"], [1, 2]], 3 + 12 + 3 + 2),
            ([5, "ab", 6], 4),
        ):
            answer = (await stand.http.post("/v1/embeddings", json={"input": given})).json()
            assert answer["usage"]["prompt_tokens"] == n_tokens, given
        for wrong, name in (
            ({"content": "x"}, "input"),
            ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "input"),
            ([["a"]], "input[0]"),
        ):
            assert await refusal(stand, "/v1/embeddings", {"input": wrong}) == (400, name)


async def test_completion_refuses_by_name(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for fields, name in (
            ({"prompt": ["a", ""]}, "prompt"),
            ({"prompt": ["a"] * 33}, "prompt"),
            ({"prompt": [1, 2.5]}, "prompt[1]"),
            ({"prompt": ["a", {"prompt_string": 1}]}, "prompt[1]"),
            ({"prompt": {"prompt_string": "a", "multimodal_data": "x"}}, "prompt"),
            ({"n_predict": 1, "max_tokens": 2}, "n_predict"),
            ({"n_probs": 21}, "n_probs"),
            ({"post_sampling_probs": True}, "post_sampling_probs"),
            ({"logit_bias": [[7, 101]]}, "logit_bias"),
            ({"logit_bias": [[7, True]]}, "logit_bias"),
            ({"logit_bias": [[-7, 1]]}, "logit_bias"),
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


async def test_what_stands_between_two_texts(tmp_path: Path) -> None:
    """The pool makes a token of each byte."""
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        body = {"input_prefix": "ab", "input_suffix": "yz", "prompt": "c", "n_predict": 5}
        assert await refusal(stand, "/infill", body) == (400, "model")
        stand.pool.infill = InfillTokens(70, 71, 72, None, 74)
        answer = await stand.http.post("/infill", json=body)
        assert (answer.status_code, answer.json()["content"]) == (200, "Hello there.")
        files = [{"filename": "f", "text": "xx"}]
        await stand.http.post("/infill", json=body | {"input_extra": files})
        plain, with_files = (list(call.prompt.tokens or ()) for call in stand.pipelines.calls)
        assert plain == [1, 74, *b"filename\n", 70, *b"abc", 71, *b"yz", 72]
        assert with_files == [1, 74, *b"f\nxx", 74, *b"filename\n", 70, *b"abc", 71, *b"yz", 72]
        stand.pool.infill = InfillTokens(70, 71, 72)
        await stand.http.post("/infill", json=body | {"input_extra": files})
        without = list(stand.pipelines.calls[-1].prompt.tokens or ())
        assert without == [1, *b"\n\n--- snippet ---\n\nxx", 70, *b"abc", 71, *b"yz", 72]
        for extra in ({}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"filename": "a", "text": 1}):
            status, _ = await refusal(stand, "/infill", body | {"input_extra": [extra]})
            assert status == 400
        assert await refusal(stand, "/infill", body | {"prompt": [1, 2]}) == (400, "prompt")


async def test_a_prompt_that_is_too_long_is_told_as_that_server_tells_it(tmp_path: Path) -> None:
    full = ContextFull("the prompt has 9 tokens", field="prompt", n_prompt_tokens=9, n_ctx=8)
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        stand.pipelines.script = Script(fail_before=full)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body, kind in (
            ("/completion", {"prompt": "hi"}, "exceed_context_size_error"),
            ("/chat/completions", chat, "exceed_context_size_error"),
            ("/chat/completions", chat | {"stream": True}, "exceed_context_size_error"),
            ("/v1/chat/completions", chat, "invalid_request_error"),
        ):
            answer = await stand.http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, kind)
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (9, 8)
            assert error["code"] == "context_length_exceeded"


async def test_n_predict_is_a_word_for_max_tokens(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat)):
            await stand.http.post(path, json=body | {"n_predict": 5})
            assert stand.pipelines.calls[-1].sampling.max_tokens == 5
            await stand.http.post(path, json=body | {"n_predict": -1})
            assert stand.pipelines.calls[-1].sampling.max_tokens > 1000
            for fields in ({"n_predict": 5, "max_tokens": 6}, {"n_predict": 0}):
                status, _ = await refusal(stand, path, body | fields)
                assert status == 400


async def test_props_tell_what_a_names_preset_says(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        preset = {"sampling": {"temperature": 0.25, "seed": 42}, "max_tokens": 9}
        await stand.http.post("/api/admin/models/guide/preset", json=preset)
        props = (await stand.http.get("/props", params={"model": "guide"})).json()
        told = props["default_generation_settings"]["params"]
        assert (told["temperature"], told["seed"], told["n_predict"]) == (0.25, 42, 9)
        assert props["is_sleeping"] is True
        await stand.load_guide()
        assert (await stand.http.get("/props", params={"model": "guide"})).json()["is_sleeping"] is False


async def test_answers_have_timings_and_a_fingerprint(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        for path, body in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": "hi"},
        }.items():
            whole = (await stand.http.post(path, json={"model": "guide"} | body)).json()
            assert whole["system_fingerprint"].startswith("swarmllm-")
            assert whole["timings"]["predicted_per_second"] == 4.0
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


async def test_a_stream_begins_with_null_on_llamacpps_path_only(tmp_path: Path) -> None:
    body = {"model": "guide", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with serve_node(tmp_path) as stand:
        for path, content in (("/chat/completions", {"content": None}), ("/v1/chat/completions", {})):
            answer = await stand.http.post(path, json=body)
            first = json.loads(answer.text.partition("\n")[0].removeprefix("data: "))
            assert first["choices"][0]["delta"] == {"role": "assistant", "refusal": None} | content


async def test_a_request_without_a_model_is_told_which_ones_there_are(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        asked = {"prompt": "a", "n_predict": 1}
        idle = (await stand.http.post("/completion", json=asked)).json()["error"]
        assert (idle["param"], idle["message"][-7:]) == ("model", " guide.")
        await stand.node.models.remove("guide")
        nothing = (await stand.http.post("/completion", json=asked)).json()["error"]
        assert nothing["message"].startswith("No model is known here")
