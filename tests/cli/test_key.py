"""`swarmllm key`, and the key that the other commands send."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_node import FakeNode

from swarmllm.cli import client
from swarmllm.cli.main import main
from swarmllm.keys import KeyFile


def key(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["key", *arguments, "--data-dir", str(folder)])


def test_a_key_is_shown_once_and_listed_without_itself(tmp_path: Path) -> None:
    assert "swarmllm key create" in key(tmp_path, "list").output
    made = key(tmp_path, "create", "laptop")
    secret = made.stdout.strip()
    assert secret.startswith("sk-swarm-")
    assert "not shown again" in made.stderr
    operator = json.loads(key(tmp_path, "create", "operator", "--admin", "--json").output)
    assert (operator["is_admin"], operator["key"][:9]) == (True, "sk-swarm-")
    shown = key(tmp_path, "list").output
    assert "laptop" in shown
    assert "admin" in shown
    assert secret not in shown
    listed = json.loads(key(tmp_path, "list", "--json").output)
    assert [(item["name"], item["is_admin"]) for item in listed] == [("laptop", False), ("operator", True)]
    assert "key" not in listed[1]
    assert "revoked" in key(tmp_path, "revoke", "laptop").output
    assert [item.name for item in KeyFile(tmp_path).list()] == ["operator"]


def test_a_key_has_a_tier_and_may_have_a_limit(tmp_path: Path) -> None:
    key(tmp_path, "create", "laptop")
    key(tmp_path, "create", "guest", "--tier", "bronze", "--rate-limit", "20")
    listed = json.loads(key(tmp_path, "list", "--json").output)
    assert [(item["tier"], item["rate_limit"]) for item in listed] == [("gold", 0), ("bronze", 20)]
    assert "20/min" in key(tmp_path, "list").output
    assert key(tmp_path, "create", "other", "--tier", "lead").exit_code == client.EXIT_USAGE


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    key(tmp_path, "create", "laptop")
    again = key(tmp_path, "create", "laptop")
    assert (again.exit_code, "revoke it first" in again.output) == (client.EXIT_REFUSED, True)
    unknown = key(tmp_path, "revoke", "phone")
    assert (unknown.exit_code, "no key 'phone'" in unknown.output) == (client.EXIT_REFUSED, True)
    (tmp_path / "keys.json").write_text("damaged")
    broken = key(tmp_path, "list")
    assert (broken.exit_code, "Cannot read the keys" in broken.output) == (client.EXIT_FAILED, True)


def test_commands_send_the_key_they_are_given(
    run: Callable[..., Result], node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMLLM_KEY", "sk-swarm-test")
    refusal = {"error": {"message": "No such key.", "type": "authentication_error"}}
    node.on("GET", "/api/admin/stats", refusal, 401)
    result = run("status")
    assert (result.exit_code, result.output) == (
        client.EXIT_REFUSED,
        "Error: No such key. Put it into SWARMLLM_KEY.\n",
    )
    assert node.authorizations == ["Bearer sk-swarm-test"]
