"""A file of nodes to meet: what is read of it, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmllm.config import Config, NetworkTable
from swarmllm.daemon_settings import check_settings, swarm_settings
from swarmllm.errors import ConfigError
from swarmllm.swarm.discovery.bootstrap_file import ADDRESSES_MAX, FILE_MAX, read_bootstrap_file
from swarmllm.swarm.in_memory.network import node_id_named


def address(number: int) -> str:
    return f"/ip4/192.0.2.{number % 250 + 1}/tcp/8810/p2p/{node_id_named(str(number))}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "nodes.txt"


def test_addresses_come_in_order_without_comments_and_repetitions(file: Path) -> None:
    named = f"/dns4/node.example/tcp/8810/p2p/{node_id_named('a name')}"
    file.write_text(f"# ours\n\n{address(1)}\n  {named} \r\n{address(1)}\n#{address(2)}\n{address(3)}")
    assert read_bootstrap_file(file) == (address(1), named, address(3))


def test_those_of_the_configuration_come_first(file: Path, tmp_path: Path) -> None:
    file.write_text(f"{address(1)}\n{address(2)}\n")
    config = Config(network=NetworkTable(bootstrap=(address(2), address(9)), bootstrap_file=str(file)))
    check_settings(config)
    assert swarm_settings(config, tmp_path).bootstrap == (address(2), address(9), address(1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{address(1)}\nnonsense\n", "line 2"),
        ("/ip4/192.0.2.1/tcp/8810\n", "line 1.*must end in /p2p"),
        (f"{address(1)} {address(2)}\n", "line 1"),
        ("/ip4/192.0.2.1/tcp/99999/p2p/" + node_id_named("x"), "line 1"),
        ("\ud800", "not UTF-8"),
        ("x" * (FILE_MAX + 1), "KiB"),
        ("\n".join(map(address, range(ADDRESSES_MAX + 1))), "more than 256 addresses"),
    ],
    ids=["nonsense", "no id", "two in a line", "no port", "not text", "too large", "too many"],
)
def test_what_cannot_be_is_refused_with_its_line(file: Path, content: str, expected: str) -> None:
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    config = Config(network=NetworkTable(bootstrap_file=str(file)))
    with pytest.raises(ConfigError, match=rf"^network.bootstrap_file: .*{expected}") as refused:
        check_settings(config)
    assert refused.value.field == "network.bootstrap_file"


def test_as_many_as_are_allowed_are_read(file: Path) -> None:
    file.write_text("\n".join(map(address, range(ADDRESSES_MAX))))
    assert len(read_bootstrap_file(file)) == ADDRESSES_MAX


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    where = tmp_path if kind == "folder" else tmp_path / "missing"
    with pytest.raises(ConfigError, match=str(where)):
        read_bootstrap_file(where)
