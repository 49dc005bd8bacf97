"""`swarmllm demo`: three nodes on this machine, a third of the bundled model on each, one conversation
through them, and one question about a picture, at which another node looks than the one that is asked.

What is shown is what happens: separate daemons, libp2p over TCP between them, the question sent to the
first node's OpenAI endpoint, the route read from the answer. At the end everything is stopped, and checked
to be gone; where the demo fails, the end of the failing node's log is shown and all logs are kept.

They are ordinary `swarmllm daemon` processes with ports chosen by the system and a configuration file each,
so the user's own configuration, data folder and running node are not touched. Each leads its own process
session: Ctrl-C in the terminal reaches only the demo, which then stops them in order; should the demo
itself be killed, the kernel ends them (parent-death signal), and a worker ends with its daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from swarmllm.cli import demo_picture
from swarmllm.cli.chat.conversation import Conversation, question_message
from swarmllm.cli.chat.session import show_answer
from swarmllm.cli.chat.stream import as_fields
from swarmllm.cli.client import EXIT_INTERRUPTED, Client, CommandFailed
from swarmllm.cli.display import looked, make_console, route_table, safe, short_id, summary
from swarmllm.cli.options import json_option
from swarmllm.operating_system import ProcessMark, family, is_alive, signal_at_parents_end

STOP_TIMEOUT_S = 15.0
CONFIG = "config.toml"
INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM})
ONE_THREAD = {"n_threads": 1}
"""Three workers share this machine, and only one computes at a time."""


@dataclass
class DemoNode:
    """One daemon of the demo."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log_path(self) -> Path:
        return self.folder / "daemon.log"

    def announcement(self) -> dict[str, Any] | None:
        """What the daemon has written about itself (api_url, node_id, addresses ...), or None while it
        starts."""
        try:
            found = json.loads((self.folder / "data" / "daemon.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def log_tail(self, n_lines: int) -> list[str]:
        try:
            return self.log_path.read_text("utf-8", "replace").splitlines()[-n_lines:]
        except OSError:
            return []


class DemoNodes:
    """All daemons of one demo and the folder they live in."""

    def __init__(self, module: str = "swarmllm") -> None:
        """`module`: what python runs with `daemon --config FILE`."""
        self.module = module
        self.folder = Path(tempfile.mkdtemp(prefix="swarmllm-demo-"))
        self.nodes: list[DemoNode] = []

    def start(
        self,
        name: str,
        load: Sequence[str],
        bootstrap: Sequence[str],
        inference: Mapping[str, object] = ONE_THREAD,
        network: Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> DemoNode:
        """A daemon that loads `load` (NAME:START:END each) and dials `bootstrap`; `network`, and
        `settings` for the table `node`, go before what else would be there."""
        folder = self.folder / name
        folder.mkdir()
        config = folder / CONFIG
        text = configuration(name, folder / "data", load, bootstrap, inference, network, settings)
        config.write_text(text, "utf-8")
        with _uninterrupted():
            node = DemoNode(name, folder, launch(folder, self.module))
            self.nodes.append(node)
        return node

    def restart(self, node: DemoNode) -> None:
        """Start a daemon that has ended, with what it had: its folder, its identity, other ports."""
        (node.folder / "data" / "daemon.json").unlink(missing_ok=True)
        node.process.wait(STOP_TIMEOUT_S)
        with _uninterrupted():
            node.process = launch(node.folder, self.module)

    def stop(self) -> list[ProcessMark]:
        """End every daemon; returns the processes of the demo that survived, which should be none."""
        marks = [mark for node in self.nodes for mark in family(node.process.pid)]
        for node in reversed(self.nodes):
            if node.process.poll() is None:
                node.process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for node in self.nodes:
            try:
                node.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        while (alive := [mark for mark in marks if is_alive(mark)]) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return alive

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: in the middle of starting a process it would leave one that nobody knows of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(folder: Path, module: str) -> subprocess.Popen[bytes]:
    """The daemon whose config.toml is in that folder; its log goes there."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARMLLM_")}
    parent = os.getpid()
    ask_for_signal = signal_at_parents_end(signal.SIGTERM)

    def end_with_parent() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
        ask_for_signal()
        if os.getppid() != parent:
            os._exit(1)

    with (folder / "daemon.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, "daemon", "--config", str(folder / CONFIG)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def configuration(
    name: str,
    data_dir: Path,
    load: Sequence[str],
    bootstrap: Sequence[str],
    inference: Mapping[str, object],
    network: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
) -> str:
    """A daemon's TOML file."""
    tables: dict[str, dict[str, object]] = {
        "node": {"nickname": name, "data_dir": str(data_dir), **(settings or {})},
        "network": {
            "listen_host": "127.0.0.1",
            "libp2p_port": 0,
            "data_port": 0,
            "bootstrap": list(bootstrap),
            "mdns": False,
            **(network or {}),
        },
        "api": {"port": 0},
        "inference": dict(inference),
        "model": {"load": list(load)},
    }
    return "\n".join(
        line
        for table, keys in tables.items()
        for line in [f"[{table}]", *(f"{key} = {as_toml(value)}" for key, value in keys.items()), ""]
    )


def as_toml(value: object) -> str:
    """Strings, integers, booleans and lists of them, which TOML spells as JSON does but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


MODEL = "guide"
PARTS = {"node-1": "0:4", "node-2": "4:8", "node-3": "8:12"}
"""Which node gets which layers; together all of the bundled model's."""
SEER = "node-3"
"""Which node looks at pictures; the others have let go of the projector."""
QUESTIONS = ("What is SwarmLLM?", "What is a pipeline?", "Why is that useful?")
START_TIMEOUT_S = 120.0
MAX_TOKENS = 200
POLL_INTERVAL_S = 0.1
LOG_TAIL_LINES = 20


class NodeFailed(CommandFailed):
    """A daemon of the demo could not do its part."""

    def __init__(self, message: str, node: DemoNode) -> None:
        super().__init__(message)
        self.node = node


class Startup:
    """Starts the daemons, the later ones once the first can be dialled, and knows how far each is."""

    def __init__(self, nodes: DemoNodes) -> None:
        self._nodes = nodes
        self._states: dict[str, str] = dict.fromkeys(PARTS, "waits for node-1")
        self._ready: set[str] = set()
        self._model_missing = ""

    @property
    def done(self) -> bool:
        return self._ready == set(PARTS) and not self._model_missing

    @property
    def first_api_url(self) -> str:
        announcement = self._nodes.nodes[0].announcement()
        assert announcement is not None
        return str(announcement["api_url"])

    def advance(self) -> None:
        """Look at every daemon once. Raises NodeFailed."""
        if not self._nodes.nodes:
            self._start("node-1", ())
        first = self._nodes.nodes[0].announcement()
        if first and len(self._nodes.nodes) == 1:
            for name in list(PARTS)[1:]:
                self._start(name, first["addresses"])
        for node in self._nodes.nodes:
            self._look_at(node)
        if first and self._ready == set(PARTS):
            with Client(str(first["api_url"])) as client:
                status = client.get(f"/api/admin/models/{MODEL}/status")
            self._model_missing = "" if status["complete"] else ", ".join(status["missing"]) or "a route"

    def _start(self, name: str, bootstrap: tuple[str, ...] | list[str]) -> None:
        self._nodes.start(name, [f"{MODEL}:{PARTS[name]}"], bootstrap)

    def _look_at(self, node: DemoNode) -> None:
        if (status := node.process.poll()) is not None:
            raise NodeFailed(f"{node.name} stopped by itself (exit status {status}).", node)
        if node.name in self._ready:
            return
        announcement = node.announcement()
        if announcement is None:
            self._states[node.name] = "starting"
            return
        with Client(str(announcement["api_url"])) as client:
            health = client.get_any("/health/ready")
        if health["status"] == "failed":
            raise NodeFailed(f"{node.name}: {health['reason']}", node)
        if health["status"] == "ready":
            self._ready.add(node.name)
        self._states[node.name] = str(health["reason"] or health["status"])

    def view(self, spinner: Spinner) -> Group:
        """One line per node, and what is waited for."""
        grid = Table.grid(padding=(0, 2))
        for name, layers in PARTS.items():
            node = next((node for node in self._nodes.nodes if node.name == name), None)
            announcement = node.announcement() if node else None
            mark = Text("✓", "green") if name in self._ready else spinner
            identity = short_id(str(announcement["node_id"])) if announcement else ""
            grid.add_row(" ", mark, name, Text(identity, "dim"), f"layers {layers}", self._states[name])
        waiting = f"  node-1 does not see layers {self._model_missing} yet" if self._model_missing else ""
        return Group(grid, waiting) if waiting else Group(grid)


def start_nodes(nodes: DemoNodes, console: Console) -> str:
    """Start all daemons and wait until the first one sees every layer; returns its API address."""
    startup = Startup(nodes)
    spinner = Spinner("dots")
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while not startup.done:
            startup.advance()
            live.update(startup.view(spinner), refresh=console.is_terminal)
            if time.monotonic() > deadline_s:
                raise CommandFailed(f"The nodes were not ready within {START_TIMEOUT_S:.0f} s.")
            time.sleep(POLL_INTERVAL_S)
        live.update(startup.view(spinner), refresh=True)
    return startup.first_api_url


def converse(api_url: str, questions: tuple[str, ...], console: Console) -> list[dict[str, object]]:
    """Ask the questions in one conversation, then show the way the last answer took. Returns each question
    with its answer and how it went, for programs."""
    answers: list[dict[str, object]] = []
    with Client(api_url) as client:
        sampling: dict[str, object] = {"temperature": 0, "max_tokens": MAX_TOKENS}
        conversation = Conversation(client, MODEL, sampling)
        for question in questions:
            console.print(Text.assemble(("\n› ", "bold cyan"), (question, "bold")))
            show_answer(conversation, question, console)
            if conversation.last:
                console.print(summary(conversation.last), style="dim")
                answer = conversation.messages[-1]["content"]
                answers.append({"question": question} | as_fields(answer, conversation.last))
        if conversation.last:
            console.print("\nThe way of the last answer:", style="bold")
            console.print(route_table(conversation.last))
    return answers


def leave_seeing_to_one(nodes: DemoNodes) -> None:
    """Every node has the guide's projector. Unload it but on one, and wait until the first node knows of that
    one. Raises CommandFailed."""
    urls = {node.name: str((node.announcement() or {})["api_url"]) for node in nodes.nodes}
    for name, api_url in urls.items():
        if name != SEER:
            with Client(api_url) as client:
                client.post(f"/api/admin/models/{MODEL}/unload", {"layers": "mmproj"})
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with Client(urls["node-1"]) as client:
        while len(client.get(f"/api/admin/models/{MODEL}/status")["encoders"]) != 1:
            if time.monotonic() > deadline_s:
                raise CommandFailed(
                    f"node-1 did not learn within {START_TIMEOUT_S:.0f} s who encodes pictures."
                )
            time.sleep(POLL_INTERVAL_S)


def show_picture(api_url: str, console: Console) -> dict[str, object]:
    """Ask about a picture, and show who looked at it. Returns question and answer, for programs."""
    image = demo_picture.picture()
    question = demo_picture.QUESTION
    console.print(f"\nA picture; only {SEER} has the projector loaded, node-1 is asked:\n", style="bold")
    console.print(demo_picture.shown(image, console))
    console.print(Text.assemble(("\n› ", "bold cyan"), (question, "bold")))
    with Client(api_url) as client:
        conversation = Conversation(client, MODEL, {"temperature": 0, "max_tokens": MAX_TOKENS})
        show_answer(conversation, question_message(question, [demo_picture.as_file(image)]), console)
    finished = conversation.last
    if finished is None:
        return {"question": question}
    console.print(summary(finished), style="dim")
    for line in looked(finished):
        console.print(safe(line), style="dim")
    answer = conversation.messages[-1]["content"]
    return {"question": question, "picture": demo_picture.IN_WORDS} | as_fields(answer, finished)


def clean_up(nodes: DemoNodes, console: Console, *, keep_folder: bool) -> None:
    """Stop everything, check that it is gone. Raises CommandFailed where something is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave anything behind
    n_nodes = len(nodes.nodes)
    survivors = nodes.stop()
    if survivors:
        pids = ", ".join(str(mark.pid) for mark in survivors)
        raise CommandFailed(f"These processes of the demo are still running: {pids}. Logs: {nodes.folder}")
    if keep_folder:
        return
    nodes.remove_folder()
    if nodes.folder.exists():
        raise CommandFailed(f"The folder {nodes.folder} could not be removed.")
    if n_nodes:
        console.print(f"\nStopped {n_nodes} nodes and their workers; nothing is left running.", style="dim")


def show_log(nodes: list[DemoNode], console: Console) -> None:
    for node in nodes:
        console.print(f"\nThe end of {node.log_path}:", style="bold")
        for line in node.log_tail(LOG_TAIL_LINES):
            console.print(f"  {line}", style="dim", soft_wrap=True)


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that its daemons are stopped too."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        handlers[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@click.command(
    short_help="Start three nodes here, ask the bundled model, show the route.",
    epilog="""\b
Examples:
  swarmllm demo
  swarmllm demo "What is a worker?" "And what happens when it dies?"
""",
)
@click.argument("questions", nargs=-1)
@json_option
def demo(questions: tuple[str, ...], as_json: bool) -> None:
    """Start three nodes on this machine, each with a third of the bundled model, and ask it something.

    The QUESTIONS are asked in one conversation, through the OpenAI endpoint of the first node; the answers
    and the route they took are shown. Without QUESTIONS there are three, and then one about a picture, which
    the third node encodes. At the end everything is stopped and removed. Nothing of yours is touched: the
    nodes have their own folders and ports.
    """
    console = make_console(stderr=as_json)
    console.print(
        f"Three nodes on this machine, a third of the {MODEL} model's layers on each:\n", style="bold"
    )
    nodes = DemoNodes()
    failed = True
    with signals_as_interrupt():
        try:
            api_url = start_nodes(nodes, console)
            console.print(f"\nnode-1 sees all layers. Its OpenAI endpoint: {api_url}/v1", style="dim")
            answers = converse(api_url, questions or QUESTIONS, console)
            if not questions:
                leave_seeing_to_one(nodes)
                answers.append(show_picture(api_url, console))
            failed = False
            if as_json:
                click.echo(json.dumps(answers, ensure_ascii=False))
        except KeyboardInterrupt:
            failed = False
            console.print("\nInterrupted.")
            raise SystemExit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            failed = False  # nobody reads any more; that is no failure of the nodes
            raise
        except CommandFailed as error:
            show_log([error.node] if isinstance(error, NodeFailed) else nodes.nodes, console)
            raise
        finally:
            clean_up(nodes, console, keep_folder=failed)
