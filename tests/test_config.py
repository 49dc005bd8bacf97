"""Configuration: sources in order, mistakes named, documentation equal to the code."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm import __version__
from swarmllm.config import TABLES, Config, NetworkTable, as_dict, default_data_dir, keys_of
from swarmllm.config_reference import reference
from swarmllm.config_sources import load_config
from swarmllm.daemon_settings import swarm_settings
from swarmllm.errors import ConfigError

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


def test_without_sources_the_defaults_hold() -> None:
    assert load_config(env={"XDG_CONFIG_HOME": "/nowhere"}) == Config()


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, '[api]\nport = 1\n[node]\nnickname = "file"\n[network]\nlibp2p_port = 1\n')
    env = {"SWARMLLM_API_PORT": "2", "SWARMLLM_NODE_NICKNAME": "env"}
    config = load_config(file, env=env, flags={"api.port": 3, "network.libp2p_port": None})
    assert (config.api.port, config.node.nickname, config.network.libp2p_port) == (3, "env", 1)


def test_the_default_file_is_read_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "swarmllm").mkdir()
    write(tmp_path / "swarmllm", "[api]\nport = 9\n")
    assert load_config(env={"XDG_CONFIG_HOME": str(tmp_path)}).api.port == 9


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("SWARMLLM_NETWORK_MDNS", "false", False),
        ("SWARMLLM_NETWORK_MDNS", "YES", True),
        ("SWARMLLM_MODEL_LOAD", "guide:0:4, guide:8:12,", ("guide:0:4", "guide:8:12")),
        ("SWARMLLM_INFERENCE_QUEUE_TIMEOUT_S", "1.5", 1.5),
        ("SWARMLLM_INFERENCE_N_SLOTS", "3", 3),
        ("SWARMLLM_NODE_NICKNAME", "42", "42"),
    ],
)
def test_text_from_the_environment_becomes_the_keys_type(name: str, text: str, value: object) -> None:
    table, _, key = name.removeprefix("SWARMLLM_").lower().partition("_")
    assert getattr(getattr(load_config(env={name: text, "XDG_CONFIG_HOME": "/nowhere"}), table), key) == value


@pytest.mark.parametrize(
    ("toml", "names"),
    [
        ("[api]\nprot = 1\n", ["prot", "'port'"]),
        ("[aip]\nport = 1\n", ["aip", "'api'"]),
        ("api = 1\n", ["[api]"]),
        ('[api]\nport = "8800"\n', ["api.port", "int", "config.toml"]),
        ("[api]\nport = 70000\n", ["api.port"]),
        ("[network]\nmdns = 1\n", ["network.mdns"]),
        ('[network]\nbootstrap = "/ip4/1.2.3.4"\n', ["network.bootstrap"]),
        ('[node]\nlog_level = "loud"\n', ["node.log_level"]),
        ("[inference]\nqueue_timeout_s = 0\n", ["inference.queue_timeout_s"]),
        ("[api\n", ["config.toml"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, toml: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, toml), env={})
    assert all(name in caught.value.message for name in names), caught.value.message


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "none.toml", env={})


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({"SWARMLLM_API_PROT": "1"}, ["SWARMLLM_API_PROT", "'port'"]),
        ({"SWARMLLM_API_PORT": "many"}, ["api.port", "SWARMLLM_API_PORT"]),
        ({"SWARMLLM_NETWORK_MDNS": "perhaps"}, ["network.mdns"]),
    ],
)
def test_a_mistake_in_the_environment_is_named(env: dict[str, str], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(env=env | {"XDG_CONFIG_HOME": "/nowhere"})
    assert all(name in caught.value.message for name in names), caught.value.message


def test_other_variables_of_the_environment_are_left_alone() -> None:
    env = {"SWARMLLM_API": "http://127.0.0.1:1", "SWARMLLM_OTHER_X": "1", "PATH": "/bin"}
    assert load_config(env=env | {"XDG_CONFIG_HOME": "/nowhere"}) == Config()


@given(st.dictionaries(st.sampled_from(["SWARMLLM_API_PORT", "SWARMLLM_MODEL_LOAD"]), st.text(max_size=20)))
def test_any_text_gives_a_configuration_or_a_config_error(env: dict[str, str]) -> None:
    try:
        config = load_config(env=env | {"XDG_CONFIG_HOME": "/nowhere"})
    except ConfigError:
        return
    assert 0 <= config.api.port <= 65535


def test_folders_follow_the_xdg_conventions() -> None:
    assert default_data_dir({"XDG_DATA_HOME": "/data"}) == Path("/data/swarmllm")
    assert load_config(env={}, flags={"node.data_dir": "~/x"}).data_dir == Path.home() / "x"


def test_values_that_depend_on_the_machine_are_filled_in() -> None:
    config = Config()
    assert config.nickname
    assert config.n_threads >= 1


def test_every_key_says_what_it_is_and_can_be_shown_as_json() -> None:
    shown = as_dict(Config())
    for table in TABLES:
        for key, field in keys_of(table).items():
            assert field.metadata["doc"].endswith(".")
            assert key in shown[table]


def test_tables_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().api.port = 1  # type: ignore[misc]


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((DOCS.parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_the_documentation_is_that_of_the_code() -> None:
    assert DOCS.read_text() == reference(), "run: python -m swarmllm.config_reference > docs/configuration.md"


@pytest.mark.parametrize(
    "text", ["", "a..b", "localhost", "/ip4/192.0.2.1/tcp/1", "999.1.1.1", "fe80::1%eth0", "١.1.1.1"]
)
@pytest.mark.parametrize("field", ["listen_host", "announce"])
def test_an_address_that_is_none_is_refused_by_its_setting(tmp_path: Path, field: str, text: str) -> None:
    value: Any = text if field == "listen_host" else (text,)
    config = Config(network=NetworkTable(**{field: value}))
    with pytest.raises(ConfigError, match=f"network.{field}: .* is not an IP address") as refused:
        swarm_settings(config, tmp_path)
    assert refused.value.field == f"network.{field}"


def test_addresses_are_taken_as_they_are_told(tmp_path: Path) -> None:
    config = Config(network=NetworkTable(listen_host="::", announce=("192.0.2.1", "2001:db8::1")))
    settings = swarm_settings(config, tmp_path)
    assert (settings.listen_host, settings.announce) == ("::", ("192.0.2.1", "2001:db8::1"))
    assert swarm_settings(Config(), tmp_path).listen_host == "*"
