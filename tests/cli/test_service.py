"""`swarmllm service` with a systemctl of our own on the path."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarmllm.cli import client
from swarmllm.cli import service as service_command
from swarmllm.cli.main import main
from swarmllm.cli.service import first_private_folder, quoted, unit_file, unit_text


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for every call of systemctl; it fails where $FAIL_AT is among its arguments."""
    program, written = tmp_path / "bin" / "systemctl", tmp_path / "calls"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {shlex.quote(str(written))}\n'
        'case "$* " in *"${FAIL_AT:-nothing} "*) echo "Failed to connect to bus" >&2; exit 1;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return written


def service(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["service", *arguments])


def test_the_service_is_installed_started_and_removed(tmp_path: Path, calls: Path) -> None:
    file = tmp_path / "config" / "systemd" / "user" / "swarmllm.service"
    result = service("install")
    assert result.exit_code == 0
    assert str(file) in result.output
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(file.read_text())
    assert unit["Service"]["Type"] == "notify"
    assert shlex.split(unit["Service"]["ExecStart"]) == [sys.executable, "-m", "swarmllm", "daemon"]
    assert calls.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable swarmllm.service",
        "--user restart swarmllm.service",
    ]
    assert service("uninstall").exit_code == 0
    assert not file.exists()
    assert calls.read_text().splitlines()[3:] == [
        "--user disable --now swarmllm.service",
        "--user daemon-reload",
    ]
    assert "nothing to remove" in service("uninstall").output


def test_a_unit_can_be_printed_or_left_alone(tmp_path: Path, calls: Path) -> None:
    assert service("install", "--print").output == unit_text(None, system=False)
    assert json.loads(service("install", "--print", "--json").output)["unit"] == unit_text(None, system=False)
    assert not (tmp_path / "config").exists()
    installed = json.loads(service("install", "--no-start", "--json").output)
    assert (Path(installed["path"]).read_text(), installed["started"]) == (
        unit_text(None, system=False),
        False,
    )
    assert not calls.exists()
    assert json.loads(service("uninstall", "--json").output) == {"path": installed["path"]}


def test_a_configuration_that_cannot_be_used_is_not_installed(tmp_path: Path, calls: Path) -> None:
    file = tmp_path / "my node.toml"
    file.write_text("[api]\nprot = 1\n")
    assert service("install", "--config", str(file)).exit_code == client.EXIT_USAGE
    file.write_text("[api]\nport = 1\n")
    printed = service("install", "--print", "--config", str(file)).output
    assert f'"--config" "{file}"' in printed


def test_a_bootstrap_node_has_a_unit_of_its_own(tmp_path: Path, calls: Path) -> None:
    assert service("install").exit_code == 0
    installed = service("install", "--bootstrap")
    assert installed.exit_code == 0
    assert "journalctl --user -u swarmllm-bootstrap -f" in installed.output
    units = tmp_path / "config" / "systemd" / "user"
    text = (units / "swarmllm-bootstrap.service").read_text()
    assert text == unit_text(None, system=False, bootstrap=True)
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    assert shlex.split(unit["Service"]["ExecStart"]) == [sys.executable, "-m", "swarmllm", "bootstrap"]
    assert unit["Unit"]["Description"] == "SwarmLLM bootstrap node"
    assert calls.read_text().splitlines()[-2:] == [
        "--user enable swarmllm-bootstrap.service",
        "--user restart swarmllm-bootstrap.service",
    ]
    assert service("uninstall", "--bootstrap").exit_code == 0
    assert [file.name for file in units.iterdir()] == ["swarmllm.service"], "the daemon's stays"
    of_machine = service("install", "--system", "--bootstrap", "--print").output
    assert "\nPrivateDevices=yes\n" in of_machine
    assert "PrivateDevices" not in service("install", "--system", "--print").output, "a GPU is one"


def test_what_systemctl_says_is_passed_on(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT", "daemon-reload")
    result = service("install")
    assert result.exit_code == client.EXIT_FAILED
    assert "Failed to connect to bus" in result.output
    monkeypatch.setenv("PATH", "")
    assert "There is no systemctl here" in service("install").output


@pytest.mark.parametrize("mode", [(), ("--bootstrap",)], ids=["daemon", "bootstrap"])
def test_the_machines_unit_passes_systemds_own_examination(tmp_path: Path, mode: tuple[str, ...]) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    file = tmp_path / "swarmllm.service"
    file.write_text(service("install", "--system", *mode, "--print").output)
    verified = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True)
    assert "swarmllm.service" not in verified.stderr, "a directive that is unknown or wrong"
    # 10 is a unit without any hardening, 0 one that can do nothing.
    examined = subprocess.run(
        [analyze, "security", "--offline=yes", "--threshold=35", str(file)], capture_output=True, text=True
    )
    assert examined.returncode == 0, examined.stdout[-500:] + examined.stderr


def test_a_node_of_the_machine_gets_a_user_of_its_own(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "needs root" in as_user(monkeypatch, 1000, "install", "--system").output
    assert not calls.exists()
    useradd = tmp_path / "bin" / "useradd"
    useradd.write_text(f'#!/bin/sh\necho "useradd $@" >> {shlex.quote(str(calls))}\n')
    useradd.chmod(0o755)
    file = tmp_path / "system" / "swarmllm.service"
    monkeypatch.setattr(service_command, "unit_file", lambda **which: file)
    monkeypatch.setattr(service_command, "SYSTEM_USER", "nobody-knows-me")
    monkeypatch.setattr(service_command, "first_private_folder", lambda *paths: None)
    result = as_user(monkeypatch, 0, "install", "--system")
    assert result.exit_code == 0, result.output
    assert calls.read_text().splitlines() == [
        "useradd --system --home-dir /var/lib/swarmllm --shell /usr/sbin/nologin nobody-knows-me",
        "daemon-reload",
        "enable swarmllm.service",
        "restart swarmllm.service",
    ]
    unit = file.read_text()
    for expected in ("User=swarmllm", "ProtectSystem=strict", "WantedBy=multi-user.target", "Type=notify"):
        assert f"\n{expected}\n" in unit
    assert as_user(monkeypatch, 0, "uninstall", "--system").exit_code == 0
    assert not file.exists()


def test_a_node_of_the_machine_does_not_run_from_a_private_folder(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_command, "first_private_folder", lambda *paths: Path("/root"))
    result = as_user(monkeypatch, 0, "install", "--system")
    assert (result.exit_code, "may not enter /root" in result.output) == (client.EXIT_USAGE, True)
    private = tmp_path / "private"
    (private / "venv" / "bin").mkdir(parents=True)
    tmp_path.chmod(0o755)
    private.chmod(0o700)
    (private / "venv").chmod(0o700)
    assert first_private_folder(private / "venv" / "bin" / "python") in {private, *tmp_path.parents}
    python, inside = tmp_path / "python", private / "python"
    inside.touch()
    python.symlink_to(inside)
    everybodys = first_private_folder(python)
    assert first_private_folder(python, python.resolve()) == (everybodys or private), "links are followed"
    assert unit_file(system=True) == Path("/etc/systemd/system/swarmllm.service")


def as_user(monkeypatch: pytest.MonkeyPatch, uid: int, *arguments: str) -> Result:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    return service(*arguments)


def test_words_are_quoted_for_systemd() -> None:
    assert quoted('50% of "$HOME"\\') == '"50%% of \\"$$HOME\\"\\\\"'
    with pytest.raises(client.WrongUsage):
        quoted("two\nlines")
