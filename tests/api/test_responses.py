"""The Responses API over HTTP, on a node that plays a script; the real client is in test_openai_tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio
from api_fakes import Script, Stand, serve_node

from swarmllm.api.openai.responses import ResponseNotFound, ResponseStore
from swarmllm.api.openai.schema import UserMessage
from swarmllm.errors import RemoteError

pytestmark = pytest.mark.slow

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "guide", "input": "hello"}
TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object"}}]
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


async def events(stand: Stand, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await stand.http.post(PATH, json=HELLO | {"stream": True} | body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = []
    for block in answer.text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        told.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert kind == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def replayed(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events build up, checked against each other."""
    items: list[dict[str, Any]] = []
    text = ""
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            text = ""
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "output_item.done":
            items.append(event["item"])
    return items


async def test_a_stream_builds_up_the_same_as_a_whole_answer(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["<think>hm</think>", "Let me see. ", *CALL])
        whole = (await stand.http.post(PATH, json=HELLO | {"tools": TOOLS})).json()
        told = await events(stand, {"tools": TOOLS})
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = told[-1]["response"]
    assert replayed(told) == final["output"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    for mine, theirs in zip(whole["output"], final["output"], strict=True):
        ids = ("id", "call_id")
        assert {k: v for k, v in mine.items() if k not in ids} == {
            k: v for k, v in theirs.items() if k not in ids
        }
    assert whole["output"][1]["content"][0]["text"] == "Let me see."
    assert whole["output"][2]["arguments"] == '{"zone": "UTC"}'
    assert whole["usage"]["total_tokens"] == 7 + whole["usage"]["output_tokens"]


async def test_an_answer_that_was_cut_off_is_incomplete(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(finish_reason="length")
        whole = (await stand.http.post(PATH, json=HELLO | {"max_output_tokens": 3})).json()
        told = await events(stand, {})
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert told[-1]["type"] == "response.incomplete"
    assert stand.pipelines.calls[0].sampling.max_tokens == 3


async def test_a_failure_in_the_middle_of_a_stream_is_told(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:

        async def sometimes() -> None:
            await trio.sleep(0.03)

        failure = RemoteError("node B is gone")
        stand.pipelines.script = Script(fail_after=2, failure=failure, between=sometimes)
        told = await events(stand, {})
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["message"] == "node B is gone"


async def test_items_become_the_messages_of_a_template(tmp_path: Path) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "11:00"}],
        },
        {"type": "message", "role": "developer", "content": "Be brief."},
    ]
    async with serve_node(tmp_path) as stand:
        await stand.http.post(PATH, json=HELLO | {"input": items, "instructions": "You are the guide."})
        (call,) = stand.pipelines.calls
    messages = call.prompt.messages or []
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "system",
    ]
    assert messages[0]["content"] == "You are the guide."
    assert [call["function"]["arguments"] for call in messages[2]["tool_calls"]] == [{}, {"zone": "UTC"}]
    assert messages[4]["content"] == "11:00"


async def test_a_response_can_be_gone_on_from_until_it_is_deleted(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        first = (await stand.http.post(PATH, json=HELLO | {"instructions": "Only now."})).json()
        again = HELLO | {"input": "And why?", "previous_response_id": first["id"]}
        second = (await stand.http.post(PATH, json=again)).json()
        assert second["previous_response_id"] == first["id"]
        assert [message["content"] for message in stand.pipelines.calls[1].prompt.messages or []] == [
            "hello",
            "Hello there.",
            "And why?",
        ]
        third = await stand.http.post(
            PATH, json=HELLO | {"previous_response_id": second["id"], "store": False}
        )
        assert len(stand.pipelines.calls[2].prompt.messages or []) == 5
        assert (await stand.http.get(f"{PATH}/{first['id']}")).json() == first
        assert (await stand.http.delete(f"{PATH}/{first['id']}")).json()["deleted"] is True
        for gone in (first["id"], third.json()["id"], "resp_none"):
            assert (await stand.http.get(f"{PATH}/{gone}")).status_code == 404
            refused = await stand.http.post(PATH, json=HELLO | {"previous_response_id": gone})
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "reasoning"}]}, 400, "input"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content"),
        ({"input": [{"content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, 400, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input[0].content[0].image_url",
        ),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"reasoning": {"effort": "loud"}}, 400, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
        ({"stream_options": {}}, 400, "stream_options"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ],
)
async def test_refusals_name_the_field(tmp_path: Path, body: dict[str, Any], status: int, param: str) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(PATH, json=HELLO | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_the_oldest_make_room_and_nobody_sees_what_another_asked() -> None:
    store = ResponseStore(responses_max=3, bytes_max=4000)
    small = len(msgspec.json.encode([{"id": "r0"}, [UserMessage(content="x" * 10)], None]))
    for i in range(5):
        store.keep({"id": f"r{i}"}, [UserMessage(content="x" * 10)], "mine")
    assert (len(store), store.n_bytes) == (3, 3 * small)
    for gone, owner in (("r1", "mine"), ("r4", "yours")):
        with pytest.raises(ResponseNotFound):
            store.find(gone, owner, field="previous_response_id")
    store.keep({"id": "large"}, [UserMessage(content="x" * 3920)], "mine")
    assert len(store) == 1
    store.keep({"id": "too large"}, [UserMessage(content="x" * 5000)], "mine")
    assert store.find("large", "mine", field="x")
    store.delete("large", "mine", field="x")
    assert (len(store), store.n_bytes) == (0, 0)


async def test_the_items_of_a_request_are_kept_with_its_answer(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    async with serve_node(tmp_path) as stand:
        for asked, texts in (("hello", ["hello"]), (said, ["three", "two", "one"])):
            kept = (await stand.http.post(PATH, json={"model": "guide", "input": asked})).json()["id"]
            listed = (await stand.http.get(f"{PATH}/{kept}/input_items")).json()
            assert [item["content"][0]["text"] for item in listed["data"]] == texts
            assert listed["first_id"] == listed["data"][0]["id"] != listed["has_more"]
            assert len({item["id"] for item in listed["data"]}) == len(texts)
        assert listed["data"][0]["content"] == [{"type": "input_text", "text": "three"}]
        ids = [item["id"] for item in listed["data"]]

        async def page(**query: str) -> httpx.Response:
            return await stand.http.get(f"{PATH}/{kept}/input_items", params=query)

        for query, shown, has_more in (
            ({"order": "asc"}, ids[::-1], False),
            ({"order": "asc", "limit": "2"}, ids[:0:-1], True),
            ({"order": "asc", "limit": "2", "after": ids[1]}, ids[:1], False),
            ({"limit": "1", "after": ids[0]}, ids[1:2], True),
            ({"after": ids[2]}, [], False),
        ):
            told = (await page(**query)).json()
            assert ([item["id"] for item in told["data"]], told["has_more"]) == (shown, has_more)
        for name, value in (
            ("order", "up"),
            ("limit", "0"),
            ("limit", "101"),
            ("limit", "x"),
            ("after", "y"),
        ):
            refused = await page(**{name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        gone = await stand.http.get(f"{PATH}/resp_none/input_items")
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "response_id")


async def test_tokens_of_a_body_are_counted_without_an_answer(tmp_path: Path) -> None:
    """The pool makes a token of each byte of the messages, and one before them."""
    async with serve_node(tmp_path) as stand:

        async def count(body: dict[str, Any]) -> int:
            counted = (await stand.http.post(f"{PATH}/input_tokens", json={"model": "guide"} | body)).json()
            assert counted["object"] == "response.input_tokens"
            return int(counted["input_tokens"])

        short, long = [await count({"input": text}) for text in ("hello", "hello you")]
        assert long == short + len(" you")
        assert await count({"input": "hello", "instructions": "Be brief."}) > long
        first = (await stand.http.post(PATH, json=HELLO)).json()["id"]
        assert await count({"input": "hello", "previous_response_id": first}) > long
        assert len(stand.pipelines.calls) == 1
        await stand.http.post("/api/admin/models/guide/preset", json={"system": "You are a guide."})
        assert await count({"input": "hello"}) > short
        refused = await stand.http.post(f"{PATH}/input_tokens", json={"model": "guide", "input": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        gone = await stand.http.post(f"{PATH}/input_tokens", json=HELLO | {"previous_response_id": "resp_x"})
        assert gone.status_code == 404
