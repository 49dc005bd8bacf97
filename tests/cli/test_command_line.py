"""What every command has in common: help, exit codes, and how it fails."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from fake_node import FakeNode

from swarmllm.cli import client
from swarmllm.cli.daemon import FLAGS, next_steps
from swarmllm.cli.main import COMMANDS, EPILOG, main
from swarmllm.cli.options import DEFAULT_API_URL, find_api_url
from swarmllm.config import TABLES, keys_of
from swarmllm.daemon import DaemonInfo
from swarmllm.swarm.membership.network_key import OPEN_SWARM, private_network
from swarmllm_proto.identifiers import NodeId

HEAVY = {"trio", "libp2p", "quart", "numpy", "httpx", "rich", "msgspec", "swarmllm.daemon"}
QUERIES = (
    ["status"],
    ["peers"],
    ["models", "list"],
    ["models", "load", "guide"],
    ["models", "unload", "guide"],
)


def each_command(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from each_command(command, (*path, name))


ALL_COMMANDS = list(each_command(main))


def test_help_answers_without_importing_anything_heavy() -> None:
    code = (
        "import sys; from swarmllm.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted(set(sys.modules) & set(sys.argv[1].split(','))), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY)], capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "command"), ALL_COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_and_option_says_what_it_does(path: tuple[str, ...], command: click.Command) -> None:
    assert command.help
    assert command.short_help, "click would cut the first sentence short"
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_help_fits_a_terminal_of_80_columns() -> None:
    for path, command in (((), main), *ALL_COMMANDS):
        context = click.Context(command, info_name=" ".join(("swarmllm", *path)), terminal_width=80)
        assert [line for line in command.get_help(context).splitlines() if len(line) > 80] == []


def test_the_groups_short_helps_are_those_of_the_commands() -> None:
    assert {path[0]: command.short_help for path, command in ALL_COMMANDS if len(path) == 1} == {
        name: command.short_help for name, command in COMMANDS.items()
    }


def test_every_command_prints_json_on_demand() -> None:
    for path, command in ALL_COMMANDS:
        if not isinstance(command, click.Group):
            assert "as_json" in {param.name for param in command.params}, path


def test_exit_codes_are_distinct_and_documented() -> None:
    codes = {name: value for name, value in vars(client).items() if name.startswith("EXIT_")}
    assert len(set(codes.values())) == len(codes)
    for name, value in codes.items():
        if name != "EXIT_INTERRUPTED":
            assert f"{value} " in EPILOG.partition("Exit codes:")[2]


@pytest.mark.parametrize("arguments", [*QUERIES, ["chat", "hello"]], ids=" ".join)
def test_no_daemon_is_exit_code_3_and_says_how_to_start_one(arguments: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(main, [*arguments, "--api", url])
    assert result.exit_code == client.EXIT_UNREACHABLE
    assert f"No daemon answers at {url}: start one with `swarmllm daemon`" in result.output


@pytest.mark.parametrize("arguments", QUERIES, ids=" ".join)
def test_a_refusal_is_exit_code_4_and_the_daemons_words(
    run: Callable[..., Result], arguments: list[str]
) -> None:
    result = run(*arguments)
    assert result.exit_code == client.EXIT_REFUSED
    assert "Error: no /api/admin" in result.output


def test_a_fault_of_the_daemon_is_exit_code_1(run: Callable[..., Result], node: FakeNode) -> None:
    node.on("GET", "/api/admin/stats", {"error": {"message": "the worker died", "type": "server_error"}}, 503)
    result = run("status")
    assert (result.exit_code, result.output) == (client.EXIT_FAILED, "Error: the worker died\n")


@pytest.mark.parametrize("body", ["<html>hello</html>", ""])
def test_another_program_on_the_port_is_recognised(
    run: Callable[..., Result], node: FakeNode, body: str
) -> None:
    node.on("GET", "/api/admin/stats", body)
    result = run("status")
    assert result.exit_code == client.EXIT_FAILED
    assert "is not a SwarmLLM node" in result.output


@pytest.mark.parametrize(
    "url", ["ftp://example.org", "nonsense", "http://[", "http://:8800", "http://a:b", ""]
)
def test_a_bad_address_is_explained(url: str) -> None:
    result = CliRunner().invoke(main, ["status", "--api", url])
    assert result.exit_code == client.EXIT_USAGE
    assert "is not an address like http://" in result.output


def test_unknown_commands_and_options_are_usage_errors(run: Callable[..., Result]) -> None:
    assert run("stauts").exit_code == client.EXIT_USAGE
    assert run("status", "--jsno").exit_code == client.EXIT_USAGE


def test_the_daemon_with_the_default_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert find_api_url() == DEFAULT_API_URL
    (tmp_path / "swarmllm").mkdir()
    announcement = tmp_path / "swarmllm" / "daemon.json"
    announcement.write_text(json.dumps({"api_url": "http://127.0.0.1:4711"}))
    assert find_api_url() == "http://127.0.0.1:4711"
    for damaged in ("", "[]", '{"pid": 1}'):
        announcement.write_text(damaged)
        assert find_api_url() == DEFAULT_API_URL


def test_each_daemon_flag_is_a_configuration_key() -> None:
    for name in FLAGS.values():
        table, _, key = name.partition(".")
        assert table in TABLES
        assert key in keys_of(table)


def test_daemon_names_the_key_that_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[api]\nprot = 1\n")
    result = CliRunner().invoke(main, ["daemon", "--config", str(config)])
    assert result.exit_code == client.EXIT_USAGE
    assert "prot" in result.output
    assert "port" in result.output


@pytest.mark.parametrize(
    ("addresses", "is_private", "words"),
    [
        (("/ip4/127.0.0.1/tcp/1/p2p/N", "/ip4/192.0.2.1/tcp/1/p2p/N"), True, "`swarmllm invite`"),
        (("/ip4/127.0.0.1/tcp/1/p2p/N", "/ip4/192.0.2.1/tcp/1/p2p/N"), False, "/ip4/192.0.2.1/tcp/1/p2p/N"),
        (("/ip4/127.0.0.1/tcp/1/p2p/N", "/ip6/::1/tcp/1/p2p/N"), False, "cannot reach this node"),
        ((), True, "cannot reach this node"),
    ],
)
def test_a_daemon_says_where_its_dashboard_is_and_how_others_join(
    addresses: tuple[str, ...], is_private: bool, words: str
) -> None:
    started = DaemonInfo(
        pid=1, version="1", api_url="http://127.0.0.1:8800", node_id=NodeId("N"), addresses=addresses
    )
    network = private_network(bytes(32)) if is_private else OPEN_SWARM
    dashboard, api, others = next_steps(started, network).split("\n")
    assert dashboard.endswith(" http://127.0.0.1:8800/")
    assert api.endswith(" http://127.0.0.1:8800/v1")
    assert words in others
