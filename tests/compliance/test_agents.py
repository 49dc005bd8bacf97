"""Coding agents that other people wrote, through one loop with a tool each, against a real daemon.

What the guide says means nothing here, and it is too small to choose a tool: the first answer is made to call
one (see `agents.forcing_proxy`). What counts is that every request of these agents is answered with a 200 and
a well-formed stream, that they find the call in it, run it, send the result, and end."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, running_daemon

from swarmllm.guide import GUIDE_PATH

sys.path.append(str(Path(__file__).parent / "agents"))
from forcing_proxy import ForcedCall, Proxy, forcing_proxy

BIN = Path(__file__).parent / "agents" / "node_modules" / ".bin"
TIMEOUT_S = 1200
"""Their prompts have ten thousand of the guide's tokens."""
CONTEXT = 2**16
SECRET = "the swordfish swims"
QUESTION = "What is in a.txt?"
COMMAND = "cat a.txt"
MODEL = "long-guide"


def long_guide(path: Path) -> Path:
    """The guide, whose context is said to be large enough for an agent's prompts; the text suffers."""
    data = bytearray(GUIDE_PATH.read_bytes())
    key = b".context_length"
    at = data.index(key) + len(key)
    kind, _ = struct.unpack_from("<II", data, at)
    assert kind == 4, "not a 32-bit number any more"
    struct.pack_into("<I", data, at + 4, CONTEXT)
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("agents")
    inference = {"n_threads": 2, "n_ctx": CONTEXT, "n_slots": 2}
    with running_daemon(folder, "judged", load=[], inference=inference) as node:
        model = {"path": str(long_guide(folder / "guide.gguf")), "name": MODEL}
        node.http.post("/api/admin/models", json=model).raise_for_status()
        node.http.post(f"/api/admin/models/{MODEL}/load", json={}).raise_for_status()
        yield node
        assert node.process.poll() is None, "the daemon has died"
        assert "Traceback" not in node.log.read_text()


def run(folder: Path, name: str, *arguments: str) -> str:
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not here: make compliance fetches it")
    (folder / "a.txt").write_text(f"{SECRET}\n")
    subprocess.run(["git", "init", "--quiet", "."], cwd=folder, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"HOME": str(folder), "PWD": str(folder), "CODEX_HOME": str(folder / "codex")}
    environment |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    done = subprocess.run(
        [BIN / name, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout + done.stderr


def judge(proxy: Proxy, path: str) -> None:
    """Every request was answered, and the last one brought the result of the call."""
    assert len(proxy.exchanges) >= 2
    for exchange in proxy.exchanges:
        assert (exchange.path, exchange.status) == (path, 200), exchange.answer[:2000]
        assert exchange.events()
    said = proxy.exchanges[-1].asked
    assert SECRET in json.dumps((said.get("input") or said["messages"])[-1])


def test_codex(node: DaemonProcess, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    call = ForcedCall(("exec_command", "shell_command"), {"cmd": COMMAND, "command": COMMAND})
    with forcing_proxy(node.url, call) as proxy:
        (tmp_path / "codex").mkdir()
        (tmp_path / "codex" / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "swarm"\n'
            f'[model_providers.swarm]\nname = "swarm"\nbase_url = "{proxy.url}/v1"\nwire_api = "responses"\n'
        )
        options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        shown = run(tmp_path, "codex", "exec", *options, QUESTION)
    assert SECRET in shown
    record_property("requests of codex answered, all with 200, at least 2", len(proxy.exchanges))
    judge(proxy, "/v1/responses")
    for exchange in proxy.exchanges:
        kinds = [event["type"] for event in exchange.events()]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_opencode(
    node: DaemonProcess, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    call = ForcedCall(("bash",), {"command": COMMAND, "description": "Read a.txt"})
    with forcing_proxy(node.url, call) as proxy:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "swarm",
            "options": {"baseURL": f"{proxy.url}/v1", "apiKey": "none"},
            "models": {
                MODEL: {"name": MODEL, "tool_call": True, "limit": {"context": CONTEXT, "output": 200}}
            },
        }
        settings = {"autoupdate": False, "share": "disabled", "provider": {"swarm": provider}}
        chosen = {"model": f"swarm/{MODEL}", "small_model": f"swarm/{MODEL}"}
        (tmp_path / "opencode.json").write_text(json.dumps(settings | chosen))
        shown = run(tmp_path, "opencode", "run", "--model", f"swarm/{MODEL}", QUESTION)
    assert SECRET in shown
    record_property("requests of opencode answered, all with 200, at least 2", len(proxy.exchanges))
    judge(proxy, "/v1/chat/completions")
    for exchange in proxy.exchanges:
        assert exchange.answer.endswith("data: [DONE]\n\n")
        ends = [c["finish_reason"] for event in exchange.events() for c in event["choices"]]
        assert ends[-1] in ("stop", "length", "tool_calls")
