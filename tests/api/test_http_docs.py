"""docs/http.md against the code: every endpoint, every field of a chat request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import msgspec
import pytest

from swarmllm.api import create_app
from swarmllm.api.openai.chat_request import NEUTRAL
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.config import Config
from swarmllm.node import Node

DOCS = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def test_every_endpoint_is_documented() -> None:
    app = create_app(cast(Node, None), Config())
    paths = {re.sub(r"<\w+>", "{}", rule.rule) for rule in app.url_map.iter_rules()}
    documented = {
        re.sub(r"\{\w+\}", "{}", path) for path in re.findall(r"`(?:GET|POST|DELETE) (/[^`?]*)`", DOCS)
    }
    assert documented == paths


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(ChatRequest)])
def test_every_field_is_documented_or_accepted_at_its_neutral_value_only(field: str) -> None:
    assert field in NEUTRAL or f"`{field}" in DOCS
