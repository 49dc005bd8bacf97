"""The demo against real daemons: it works, and whatever happens to it, nothing is left running."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.cli.demo import MODEL, ONE_THREAD, PARTS, configuration
from swarmllm.config_sources import load_config
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import LayerRange, build_manifest, merge
from swarmllm.operating_system import family, is_alive, mark_of

TIMEOUT_S = 2 * DEADLINE_S


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, unlike tmp_path: the daemons make Unix sockets in it. What a test that failed has left running
    ends here."""
    path = Path(tempfile.mkdtemp(prefix="demo-"))
    yield path
    while STARTED:
        with STARTED.pop() as demo:
            demo.kill()
    wait_for(lambda: daemons_of(path) == [])
    shutil.rmtree(path)


def start_demo(folder: Path, *arguments: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
    demo = subprocess.Popen(
        [sys.executable, "-m", "swarmllm", "demo", *arguments],
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "SWARMLLM_API_PORT": "not a port: the demo must not read this",
        },
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    STARTED.append(demo)
    return demo


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def daemons_of(folder: Path, name: str = "") -> list[int]:
    """Processes whose command line names a file in the folder (of this node), as each daemon's --config
    does."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text(errors="replace")
        except OSError:
            continue
        if str(folder) in command and name in command:
            found.append(int(path.parent.name))
    return found


def has_started(folder: Path, name: str) -> bool:
    return bool(list(folder.glob(f"*/{name}/data/daemon.json")))


@pytest.mark.slow
def test_the_demo_answers_over_three_nodes_and_leaves_nothing(folder: Path) -> None:
    demo = start_demo(folder, "What is a node?", "Why?")
    output, _ = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 0, output
    assert output.index("› What is a node?") < output.index("› Why?")
    for name, layers in PARTS.items():
        row = rf"^{name} +…\w+ +{layers} +[\d.]+( +[\d.]+){{2}} +(1,024|-) +[\d.]+$"
        assert re.search(row, output, re.MULTILINE), output
    assert "nothing is left running" in output
    assert daemons_of(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_for_programs_the_demo_prints_its_answers_as_json(folder: Path) -> None:
    with start_demo(folder, "--json", "What is a pipeline?", stderr=subprocess.DEVNULL) as demo:
        output, _ = demo.communicate(timeout=TIMEOUT_S)
    (answer,) = json.loads(output)
    assert (demo.returncode, answer["question"]) == (0, "What is a pipeline?")
    assert "stages" in answer["text"]
    assert [stage["layers"] for stage in answer["swarm"]["route"]] == list(PARTS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: signal.Signals(number).name
)
def test_an_interrupted_demo_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    demo = start_demo(folder)
    wait_for(lambda: has_started(folder, "node-1"))
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=TIMEOUT_S)
    assert (demo.returncode, "Interrupted." in output) == (130, True)
    # One that was being started at that moment is ended by the kernel, with the demo.
    wait_for(lambda: daemons_of(folder) == [])
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_node_that_dies_fails_the_demo_and_its_log_is_kept(folder: Path) -> None:
    demo = start_demo(folder)
    wait_for(lambda: has_started(folder, "node-1"))
    wait_for(lambda: daemons_of(folder, "node-2"))
    for pid in daemons_of(folder, "node-2"):
        os.kill(pid, signal.SIGKILL)
    output, _ = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 1
    assert "node-2 stopped by itself (exit status -9)" in output
    assert re.search(r"The end of \S+/node-2/daemon.log:", output)
    assert list(folder.glob("*/node-2/daemon.log"))
    assert daemons_of(folder) == []


@pytest.mark.slow
def test_a_demo_that_nobody_reads_leaves_nothing(folder: Path) -> None:
    demo = start_demo(folder)
    assert demo.stdout is not None
    demo.stdout.close()
    assert demo.wait(TIMEOUT_S) == 1
    assert daemons_of(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_killed_demo_takes_its_daemons_and_workers_along(folder: Path) -> None:
    demo = start_demo(folder)
    wait_for(lambda: has_started(folder, "node-3"))
    marks = [mark for pid in daemons_of(folder) for mark in family(pid)]
    assert len(marks) >= len(PARTS)
    demo.kill()
    demo.communicate(timeout=TIMEOUT_S)
    wait_for(lambda: not any(map(is_alive, marks)))


def test_the_parts_cover_the_bundled_model() -> None:
    manifest = build_manifest(GUIDE_PATH, lambda done, total: None)
    parts = [LayerRange.parse(layers) for layers in PARTS.values()]
    assert merge(parts) == (manifest.whole,)
    assert sum(map(len, parts)) == manifest.n_layers, "no layer is on two nodes"


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20)


@given(name=names, bootstrap=st.lists(names.filter(lambda text: "," not in text), max_size=2))
def test_the_daemons_read_the_configuration_that_the_demo_wrote(
    tmp_path_factory: pytest.TempPathFactory, name: str, bootstrap: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "demo.toml"
    path.write_text(configuration(name, Path("/tmp/x"), [f"{MODEL}:0:4"], bootstrap, ONE_THREAD), "utf-8")
    config = load_config(path, env={})
    assert (config.node.nickname, config.network.bootstrap) == (name, tuple(bootstrap))
    assert (config.api.port, config.network.mdns, config.model.load) == (0, False, ("guide:0:4",))
    assert config.data_dir == Path("/tmp/x")


def test_a_family_is_a_process_and_its_descendants() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo started; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        marks = family(shell.pid)
        assert len(marks) == 2
        assert all(map(is_alive, marks))
        for mark in marks:
            os.kill(mark.pid, signal.SIGKILL)
        shell.wait()
    wait_for(lambda: not any(map(is_alive, marks)))
    assert mark_of(shell.pid) is None
