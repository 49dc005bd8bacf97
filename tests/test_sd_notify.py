"""What a service manager hears from the daemon."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
from daemon_process import clean_environment, toml
from deadlines import DEADLINE_S

from swarmllm.log_output import LineFormatter
from swarmllm.sd_notify import JournalFormatter, ServiceManager, is_journal


def listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(address)
    listener.settimeout(DEADLINE_S)
    return listener


def test_messages_are_lines_for_whoever_asked(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with listen(address) as listener:
        ServiceManager({"NOTIFY_SOCKET": address}).tell(READY=1, STATUS="up")
        assert listener.recv(100) == b"READY=1\nSTATUS=up"
    with listen(f"\0swarmllm-test-{os.getpid()}") as listener:
        ServiceManager({"NOTIFY_SOCKET": f"@swarmllm-test-{os.getpid()}"}).tell(READY=1)
        assert listener.recv(100) == b"READY=1"


def test_a_manager_that_is_gone_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager({}).tell(READY=1)
    assert caplog.text == ""
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).tell(READY=1)
    assert "does not listen" in caplog.text


def test_the_journal_takes_the_level_from_every_line_and_the_time_from_itself(tmp_path: Path) -> None:
    record = logging.LogRecord("swarmllm.node", logging.WARNING, "", 0, "one\n%s", ("two",), None)
    assert JournalFormatter(LineFormatter("journal")).format(record) == "<4>swarmllm.node: one\n<4>two"
    with (tmp_path / "log").open("w") as file:
        there = os.fstat(file.fileno())
        stream = f"{there.st_dev}:{there.st_ino}"
        assert is_journal({"JOURNAL_STREAM": stream}, file.fileno())
        assert not is_journal({"JOURNAL_STREAM": "1:2"}, file.fileno())
        assert not is_journal({}, file.fileno())


@pytest.mark.parametrize(
    ("env", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_the_one_asked_for(env: dict[str, str], watchdog_s: float | None) -> None:
    assert ServiceManager(env).watchdog_s == watchdog_s


async def test_the_watchdog_is_fed_twice_per_interval(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    address = str(tmp_path / "notify")
    manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "10000000"})
    with listen(address) as listener:
        with trio.move_on_after(22):
            await manager.feed_watchdog()
        listener.setblocking(False)
        assert [listener.recv(100) for _ in range(5)] == [b"WATCHDOG=1"] * 5
        with pytest.raises(BlockingIOError):
            listener.recv(100)
    await ServiceManager({"WATCHDOG_USEC": "10000000"}).feed_watchdog()


@pytest.mark.slow
def test_a_daemon_says_when_it_is_ready_alive_and_stopping(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(toml("solo", tmp_path / "data", [], [], {}))
    address = str(tmp_path / "notify")
    env = clean_environment() | {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
    with listen(address) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarmllm", "daemon", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        try:
            heard = [listener.recv(1000).decode()]
            assert (tmp_path / "data" / "daemon.json").exists()
            heard += [listener.recv(1000).decode() for _ in range(3)]
            process.send_signal(signal.SIGTERM)
            while not heard[-1].startswith("STOPPING"):
                heard.append(listener.recv(1000).decode())
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
    assert heard[0].startswith("READY=1\nSTATUS=http://127.0.0.1:")
    assert set(heard[1:-1]) == {"WATCHDOG=1"}
