"""/openapi.json against the handlers: every endpoint, every body, every reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
from api_fakes import serve_node
from node_ids import NODE_B

from swarmllm.api import create_app
from swarmllm.api.http.openapi import EVENTS, OPERATIONS, openapi_document
from swarmllm.config import Config
from swarmllm.node import Node


def test_it_has_exactly_the_endpoints_there_are() -> None:
    app = create_app(cast(Node, None), Config())
    served = {
        (method.lower(), re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == served
    assert len(OPERATIONS) == len(served)


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "$ref":
                yield item
            yield from references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references(item)


def test_every_reference_leads_somewhere() -> None:
    document = msgspec.json.decode(msgspec.json.encode(openapi_document()))
    found = set(references(document))
    assert "#/components/schemas/ChatRequest" in found
    assert {name.removeprefix("#/components/schemas/") for name in found} <= set(
        document["components"]["schemas"]
    )


@pytest.mark.slow
async def test_handlers_take_the_bodies_it_describes(tmp_path: Path) -> None:
    """An empty object is refused with the first field that the described type requires; a field that the
    type does not have, by its name where `api.strict` is set."""
    async with serve_node(tmp_path, strict=True) as stand:
        served = (await stand.http.get("/openapi.json")).json()
        assert served["openapi"] == "3.1.0"
        for operation in OPERATIONS:
            if operation.body is None:
                continue
            described = served["paths"][operation.path][operation.method]["requestBody"]
            name = described["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            schema = served["components"]["schemas"][name]
            path = operation.path.replace("{name}", "guide")
            empty = await stand.http.post(path, json={})
            required = [field for field in schema["properties"] if field in schema.get("required", ())]
            if required:
                assert empty.status_code == 400
                assert f"Missing field `{required[0]}`" in empty.text
            if schema.get("additionalProperties") is False:
                unknown = await stand.http.post(path, json={"temprature": 1})
                assert unknown.status_code == 400
                assert "temprature" in unknown.text


PARAMETERS = {"name": "guide", "node": NODE_B, "file": "style.css"}


async def test_endpoints_answer_with_the_content_types_it_names(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.tell_of_peer("node-b", "other", 4, ((0, 4),))
        asked = {"model": "guide", "input": "hello"}
        kept = (await stand.http.post("/v1/responses", json=asked)).json()["id"]
        parameters = PARAMETERS | {"response_id": kept}
        for operation in OPERATIONS:
            # A stream of events has no end; test_events reads it.
            if operation.method == "get" and operation.answers != (EVENTS,) and "{id}" not in operation.path:
                path = re.sub(r"{(\w+)}", lambda name: parameters[name[1]], operation.path)
                query = dict.fromkeys({"model"}.intersection(operation.query), "guide")
                query |= dict.fromkeys(operation.numbers, "8")
                answer = await stand.http.get(path, params=query)
                assert answer.status_code == 200
                assert answer.headers["content-type"].partition(";")[0] in operation.answers
