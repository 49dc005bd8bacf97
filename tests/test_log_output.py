"""Lines of the daemon's log: their form, what they name, and the file that they go to."""

from __future__ import annotations

import ast
import json
import logging
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemon_process import running_daemon, wait_for
from deadlines import DEADLINE_S
from node_ids import NODE_A, NODE_B

from swarmllm import log_output
from swarmllm.cli.logs import lines_of
from swarmllm.cli.main import main
from swarmllm.config import Config, LogTable, NodeTable
from swarmllm.errors import ConfigError
from swarmllm.log_filter import REQUEST_ID, provoked_by
from swarmllm.log_output import LineFormatter, event_of, fields_of, set_up_logging

ROOT = Path(__file__).parents[1]
LEVELS = ("info", "warning", "error", "exception", "critical")
REQUEST = "req_" + "ab" * 12
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


@pytest.fixture
def restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("swarmllm")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers.clear()
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def record(template: object, *args: object, name: str = "swarmllm.node") -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, template, args, None)


def names(node_id: str) -> str:
    return {NODE_A: "attic", NODE_B: "a\x1b\nb"}.get(node_id, "")


def no_models(model_id: str) -> str:
    return ""


def test_models_have_their_names() -> None:
    model, other = "ab" * 32, "cd" * 32
    fields = fields_of(record("worker %d serves model %s, %s", 7, model, other), names, {model: "guide"}.get)
    assert fields.message == f"worker 7 serves model guide, {other}"
    assert (fields.models, fields.event) == ((model,), "worker_serves_model")


def test_nodes_have_their_nicknames_and_requests_their_ids() -> None:
    fields = fields_of(record("request %s of %s, then %s: %d", REQUEST, NODE_A, NODE_B, 3), names, no_models)
    assert fields.message == f"request {REQUEST} of attic (…{NODE_A[-8:]}), then a??b (…{NODE_B[-8:]}): 3"
    assert (fields.request_id, fields.nodes) == (REQUEST, (NODE_A, NODE_B))
    assert fields.event == "request_of_then"


def test_a_nickname_that_is_there_already_is_not_written_twice() -> None:
    fields = fields_of(record("node attic (%s) has left %s", NODE_A, NODE_A), names, no_models)
    assert fields.message == f"node attic (…{NODE_A[-8:]}) has left attic (…{NODE_A[-8:]})"


def test_a_line_without_an_id_has_that_of_the_task() -> None:
    token = REQUEST_ID.set(REQUEST)
    try:
        line = LineFormatter("text").format(record("the disk is full"))
        told = LineFormatter("text").format(record("%s failed", REQUEST))
    finally:
        REQUEST_ID.reset(token)
    assert line.endswith(f"swarmllm.node: the disk is full [{REQUEST}]")
    assert told.count(REQUEST) == 1
    assert REQUEST not in LineFormatter("text").format(record("the disk is full"))


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (record("signal received: %s", "SIGTERM"), "signal_received"),
        (record("no room: %5.1f of %d %%", 1.0, 2), "no_room_of"),
        (record("x" * 200), "x" * 60),
        (record(ValueError("secret")), "valueerror"),
        (record("peer said 'anything'", name="libp2p.host"), "libp2p.host"),
    ],
)
def test_the_event_is_the_template_in_one_word(line: logging.LogRecord, event: str) -> None:
    assert event_of(line) == event


def test_every_line_of_ours_has_an_event_that_says_what_happened() -> None:
    """Two words at least, and none of them is the form of an object for developers."""
    templates = list(templates_of_log_lines())
    assert len(templates) > 150
    vague = {
        where: template
        for where, template in templates
        if "%r" in template or "_" not in event_of(record(template, name="swarmllm"))
    }
    assert vague == {}


def templates_of_log_lines() -> Iterator[tuple[str, str]]:
    """Of all lines from INFO on: where each is written, and its template."""
    for folder in ("swarmllm", "workers/swarmllm_workers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                logger = ast.unparse(node.func.value)
                if node.func.attr in LEVELS and (
                    logger in ("log", "self._log") or logger.startswith("provoked_by(")
                ):
                    template = node.args[0]
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield where, str(template.value) if isinstance(template, ast.Constant) else ""


def test_json_is_one_object_per_line_and_the_event_does_not_follow_what_strangers_send(
    tmp_path: Path, restored: None
) -> None:
    config = Config(
        node=NodeTable(data_dir=str(tmp_path / "data"), log_level="info"), log=LogTable(format="json")
    )
    set_up_logging(config).nickname_of = names
    log = logging.getLogger("swarmllm.test")
    provoked_by(log, "somebody").warning("node %s said %s", NODE_A, 'x"\n2026 ERROR')
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("it broke")
    file = tmp_path / "data" / "daemon.log"
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["event"], first["level"], first["nodes"]) == ("node_said", "warning", [NODE_A])
    assert first["message"].startswith(f"node attic (…{NODE_A[-8:]}) said ")
    assert ISO.match(first["time"] + " ")
    assert second["event"] == "it_broke"
    assert second["traceback"].endswith("ValueError: a\nb")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_file_is_renamed_when_it_is_large(
    tmp_path: Path, restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "FILE_BYTES", 2000)
    set_up_logging(Config(node=NodeTable(data_dir=str(tmp_path))))
    for index in range(100):
        logging.getLogger(f"swarmllm.{index}").warning("line %d %s", index, "x" * 60)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["daemon.log", "daemon.log.1", "daemon.log.2"]
    assert all(path.stat().st_size <= 2200 for path in tmp_path.iterdir())
    assert "line 99 " in (tmp_path / "daemon.log").read_text()


def test_a_file_that_cannot_be_written_is_named_and_off_means_none(tmp_path: Path, restored: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        set_up_logging(Config(log=LogTable(file=str(tmp_path / "file" / "log"))))
    assert caught.value.field == "log.file"
    set_up_logging(Config(node=NodeTable(data_dir=str(tmp_path / "data")), log=LogTable(file="off")))
    logging.getLogger("swarmllm").warning("said")
    assert not (tmp_path / "data").exists()


def test_following_goes_on_in_the_file_that_takes_the_place_of_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "daemon.log"
    file.write_text("1\n2\n3\n")
    waits: list[threading.Event] = []

    def instead_of_waiting(seconds: float) -> None:
        waits.append(threading.Event())
        if len(waits) == 1:
            with file.open("a") as stream:
                stream.write("4\n")
            file.rename(tmp_path / "daemon.log.1")
        elif len(waits) == 2:
            file.write_text("5\n")

    monkeypatch.setattr("swarmllm.cli.logs.time.sleep", instead_of_waiting)
    following = lines_of(file, 2, follow=True)
    assert [next(following) for _ in range(4)] == ["2\n", "3\n", "4\n", "5\n"]


def test_the_command_shows_the_last_lines_or_says_that_there_is_none(tmp_path: Path) -> None:
    env = {"SWARMLLM_NODE_DATA_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "SWARMLLM_CONFIG": ""}
    nothing = CliRunner().invoke(main, ["logs"], env=env)
    assert nothing.exit_code == 1
    assert "no systemd service" in nothing.stderr
    (tmp_path / "daemon.log").write_bytes(b"one\ntwo\n\xffthree\n")
    shown = CliRunner().invoke(main, ["logs", "--lines", "2"], env=env)
    assert (shown.exit_code, shown.stdout) == (0, "two\n�three\n")
    (tmp_path / "daemon.log").write_text('a "line"\n{"time": "now"}\n')
    shown = CliRunner().invoke(main, ["logs", "--json"], env=env)
    assert [json.loads(line) for line in shown.stdout.splitlines()] == [{"line": 'a "line"'}, {"time": "now"}]


def test_the_journal_of_an_installed_service_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = tmp_path / "systemd" / "user" / "swarmllm.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("")
    journalctl = tmp_path / "bin" / "journalctl"
    journalctl.parent.mkdir()
    journalctl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    journalctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(journalctl.parent))
    env = {"SWARMLLM_NODE_DATA_DIR": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path)}
    assert CliRunner().invoke(main, ["logs", "-f", "-n", "5"], env=env).exit_code == 0
    asked = (tmp_path / "asked").read_text()
    assert asked == "--user --unit swarmllm.service --lines 5 --output short-iso --no-pager --follow\n"


@pytest.mark.slow
def test_a_daemon_writes_the_same_lines_to_its_file(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "attic", load=[]) as node:
        file = node.data_dir / "daemon.log"
        wait_for(
            lambda: f"node attic (…{node.node_id[-8:]}) serves" in file.read_text(), DEADLINE_S, "a line"
        )
        assert all(ISO.match(line) for line in file.read_text().splitlines())
        assert node.stop() == 0
    assert node.log.read_text() == file.read_text()
