"""The JSON Schema test suite (draft 2020-12) through the rewriter and llguidance.

The suite is in the source distribution of `jsonschema`, from where `make compliance` takes it. What is
accepted must never be broken, neither by random walks nor by the suite's own invalid instances."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import referencing
import referencing.jsonschema

from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.grammars.gbnf_matcher import NotFollowed
from tests.workers.factory import SPECS, build
from tests.workers.schema_walk import Walks

SEEDS = range(3)
REFUSED_MAX = 75
"""Of 390; most of them lead to other documents."""
VALID_MIN = 720
"""Of the suite's valid instances; the others are valid but not among what may be written."""


class Group(NamedTuple):
    keyword: str
    description: str
    schema: Any
    tests: list[dict[str, Any]]


def suite_folder() -> Path:
    found = sorted(
        Path(os.environ.get("JSON_SCHEMA_SUITE", ".venv-compliance/suite")).glob("jsonschema-*/json")
    )
    if not found:
        pytest.skip("the suite is not here: make compliance fetches it")
    return found[-1]


def read_groups(folder: Path) -> list[Group]:
    tests = folder / "tests" / "draft2020-12"
    files = [*sorted(tests.glob("*.json")), *sorted((tests / "optional" / "format").glob("*.json"))]
    return [
        Group(path.stem, each["description"], each["schema"], each["tests"])
        for path in files
        for each in json.loads(path.read_text())
    ]


def read_registry(folder: Path) -> referencing.Registry:
    registry: referencing.Registry = referencing.Registry()
    for path in (folder / "remotes").rglob("*.json"):
        content = json.loads(path.read_text())
        resource = referencing.Resource.from_contents(
            content, default_specification=referencing.jsonschema.DRAFT202012
        )
        registry = registry.with_resource(
            f"http://localhost:1234/{path.relative_to(folder / 'remotes')}", resource
        )
    return registry


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Walks:
    path = build(tmp_path_factory.mktemp("suite") / "llama.gguf", SPECS["llama"])
    return Walks(Vocabulary(Model(path, vocab_only=True), GgufFile(path)))


def test_what_is_accepted_of_the_suite_is_never_broken(
    walks: Walks, record_property: Callable[[str, object], None]
) -> None:
    folder = suite_folder()
    groups, registry = read_groups(folder), read_registry(folder)
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for group in groups:
        try:
            walks.matcher(group.schema)
        except NotFollowed:
            counts["refused"] += 1
            continue
        judge = jsonschema.Draft202012Validator(
            group.schema, registry=registry, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        where = f"{group.keyword}: {group.description}"
        for seed in SEEDS:
            text = walks.write(group.schema, seed)
            if text is not None and not judge.is_valid(json.loads(text)):
                broken.append(f"{where}: wrote {text}")
        for case in group.tests:
            text = json.dumps(case["data"], separators=(",", ":"), ensure_ascii=False)
            is_taken = walks.takes(group.schema, text)
            counts["valid taken"] += case["valid"] and is_taken
            if is_taken and not case["valid"]:
                broken.append(f"{where}: takes {text}")
    record_property(
        f"JSON schemas of the suite refused, of {len(groups)}, at most {REFUSED_MAX}", counts["refused"]
    )
    record_property(f"valid instances of the suite taken, at least {VALID_MIN}", counts["valid taken"])
    record_property("invalid instances taken or written, at most 0", len(broken))
    assert len(groups) >= 380
    assert not broken
    assert counts["refused"] <= REFUSED_MAX, counts
    assert counts["valid taken"] >= VALID_MIN, counts
