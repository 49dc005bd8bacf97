"""What packages import and nobody here uses stays out of a daemon, and everything else works without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from daemon_process import running_daemon, wait_for
from deadlines import DEADLINE_S

from swarmllm.left_out import RESOLVERS, STAND_INS, TEMPLATES

NOT_IN_A_DAEMON = (
    *("PIL", "aioquic", "cffi", "dns", "httpcore2", "httpx2", "jinja2", "llama_cpp"),
    *("mistral_common", "pycparser", "requests", "rich", "swarmllm.guide.train", "swarmllm_workers", "tqdm"),
    *("trio_websocket", "yaml"),
)
NOT_WHILE_IDLE_WITHOUT_MDNS = ("zeroconf", "certifi")
MODULES_WHEN_IT_SERVES = """
import json, sys
import swarmllm.daemon
from swarmllm.cli.main import main
run_daemon = swarmllm.daemon.run_daemon
async def told(*arguments, on_serving, **options):
    def tell(info):
        print(json.dumps([name for name, module in sys.modules.items() if module]), flush=True)
        on_serving(info)
    await run_daemon(*arguments, on_serving=tell, **options)
swarmllm.daemon.run_daemon = told
main()
"""
LOOK_THEM_UP = """
import importlib, json, sys
names = json.loads(sys.argv[1])
print(json.dumps([f"{m}.{n}" for m in names for n in names[m] if not hasattr(importlib.import_module(m), n)]))
"""


def output(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def told_modules(log: Path) -> list[str] | None:
    for line in log.read_text().splitlines(keepends=True):
        if line.startswith('["') and line.endswith("\n"):
            return list(json.loads(line))
    return None


def test_a_daemon_that_serves_has_imported_nothing_of_what_is_left_out(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "idle", load=[], program=["-c", MODULES_WHEN_IT_SERVES]) as daemon:
        modules = set(wait_for(lambda: told_modules(daemon.log), DEADLINE_S, "the modules"))
    loaded = {"libp2p", "quart", "swarmllm.node", "swarmllm.daemon"} & modules
    assert len(loaded) == 4, "these are the modules of a daemon"
    assert sorted(modules & {*NOT_IN_A_DAEMON, *NOT_WHILE_IDLE_WITHOUT_MDNS}) == []


def test_each_stand_in_has_the_name_of_something_that_is_there() -> None:
    names = {**STAND_INS, **TEMPLATES, RESOLVERS: ("DNSResolver",)}
    assert json.loads(output("-c", LOOK_THEM_UP, json.dumps(names))) == []


def test_templates_can_be_imported_after_the_http_edge() -> None:
    look = "import swarmllm.api, jinja2; print(jinja2.Template('{{ 1 + 1 }}').render())"
    assert output("-c", look) == "2"


def test_a_name_in_a_peers_address_is_not_looked_up() -> None:
    dial = """
import swarmllm, trio
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr
try:
    trio.run(TCP().dial, Multiaddr("/dns4/localhost/tcp/1"))
except OpenConnectionError as error:
    print("resolve" in str(error))
"""
    assert output("-c", dial) == "True"


def test_what_others_have_imported_before_stays() -> None:
    look = "import libp2p, httpx, swarmllm; print(libp2p.QUICTransport.__module__, hasattr(httpx, 'main'))"
    assert output("-c", look) == "libp2p.transport.quic.transport True"
