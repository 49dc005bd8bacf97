"""`swarmllm config` and `swarmllm completion`: no daemon is asked."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarmllm.cli import client
from swarmllm.cli.config import as_toml
from swarmllm.cli.main import COMMANDS, main
from swarmllm.config import Config, as_dict
from swarmllm.config_sources import load_config
from swarmllm.errors import reason_of


def run(folder: Path, *arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"XDG_CONFIG_HOME": str(folder)} | environment)


def test_what_is_shown_is_a_configuration_file_that_means_the_same(tmp_path: Path) -> None:
    file = tmp_path / "swarmllm" / "config.toml"
    file.parent.mkdir()
    file.write_text(
        '[node]\nnickname = "ü \\"\\\\\\u007f🐝"\n[network]\nbootstrap = ["/ip4/192.0.2.7/tcp/1/p2p/12D3"]\n'
    )
    shown = run(tmp_path, "config", "show", SWARMLLM_API_PORT="4711")
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    config = load_config(again, env={})
    assert config == load_config(file, env={"SWARMLLM_API_PORT": "4711"})
    assert (config.node.nickname, config.api.port) == ('ü "\\\x7f🐝', 4711)
    assert json.loads(run(tmp_path, "config", "show", "--json").stdout)["node"]["nickname"] == 'ü "\\\x7f🐝'


def test_every_default_survives_toml() -> None:
    defaults = as_dict(Config())
    assert tomllib.loads(as_toml(defaults)) == json.loads(json.dumps(defaults))


def test_the_path_is_shown_whether_or_not_there_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "swarmllm" / "config.toml"
    assert run(tmp_path, "config", "path").stdout == f"{file}\n"
    assert "no such file yet" in run(tmp_path, "config", "path").stderr
    assert "defaults hold" in run(tmp_path, "config", "check").stdout
    file.parent.mkdir()
    file.touch()
    assert run(tmp_path, "config", "path").stderr == ""
    assert json.loads(run(tmp_path, "config", "path", "--json").stdout) == {"path": str(file), "exists": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[api]\nprot = 1\n", "Did you mean 'port'"),
        ("[api]\nport = 99999\n", "api.port"),
        ("[api", "Cannot read"),
    ],
)
def test_a_file_that_cannot_be_used_is_wrong_usage(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    for command in ("check", "show"):
        result = run(tmp_path, "config", command, str(file))
        assert (result.exit_code, words in result.stderr) == (client.EXIT_USAGE, True)
    file.write_text("[api]\nport = 1\n")
    assert json.loads(run(tmp_path, "config", "check", str(file), "--json").stdout)["ok"] is True
    assert run(tmp_path, "config", "check", str(tmp_path / "none.toml")).exit_code == client.EXIT_USAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_calls_this_program(tmp_path: Path, shell: str) -> None:
    script = run(tmp_path, "completion", shell).stdout
    assert f"_SWARMLLM_COMPLETE={shell}_complete" in script
    as_json = json.loads(run(tmp_path, "completion", shell, "--json").stdout)
    assert as_json == {"shell": shell, "script": script.removesuffix("\n")}


def test_completion_completes_commands_and_options(tmp_path: Path) -> None:
    def complete(words: str, index: int) -> set[str]:
        environment = {"_SWARMLLM_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        result = CliRunner().invoke(
            main, env=environment, prog_name="swarmllm", complete_var="_SWARMLLM_COMPLETE"
        )
        return {line.partition(",")[2] for line in result.stdout.splitlines()}

    assert complete("swarmllm ", 1) == set(COMMANDS)
    assert complete("swarmllm models ", 2) >= {"list", "add", "load", "unload"}
    assert "--json" in complete("swarmllm status --", 2)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("network", "listen_host", "nowhere"),
        ("inference", "pins", ["guide:0:4"]),
        ("inference", "encrypted_models", ["Two words"]),
    ],
)
def test_what_the_daemon_would_refuse_cannot_be_used(
    tmp_path: Path, table: str, key: str, value: object
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[{table}]\n{key} = {json.dumps(value)}\n")
    refused = run(tmp_path, "config", "check", str(file))
    assert refused.exit_code == client.EXIT_USAGE
    assert f"{table}.{key}: " in refused.stderr


def test_what_cannot_be_read_is_said_without_a_number(tmp_path: Path) -> None:
    refused = run(tmp_path, "config", "check", str(tmp_path))
    assert refused.exit_code == client.EXIT_USAGE
    assert "Is a directory" in refused.stderr
    assert "Errno" not in refused.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory"),
        (ConnectionError("[Errno 104] Connection reset by peer"), "Connection reset by peer"),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
        (ValueError("wrong"), "wrong"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_reason_of_a_foreign_error_has_no_number(error: Exception, words: str) -> None:
    assert reason_of(error) == words
