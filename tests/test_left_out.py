"""What packages import and nobody here uses stays out of a daemon, and everything else works without it."""

from __future__ import annotations

import json
import subprocess
import sys

from swarmllm.left_out import STAND_INS

HEAVY = ("aioquic", "httpcore2", "httpx2", "requests", "rich")
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


def test_a_daemon_imports_nothing_of_what_is_left_out() -> None:
    look = f"import swarmllm.daemon, sys; print([x for x in {HEAVY} if x in sys.modules])"
    assert output("-c", look) == "[]"


def test_each_stand_in_has_the_name_of_something_that_is_there() -> None:
    assert json.loads(output("-c", LOOK_THEM_UP, json.dumps(STAND_INS))) == []


def test_what_others_have_imported_before_stays() -> None:
    look = "import libp2p, httpx, swarmllm; print(libp2p.QUICTransport.__module__, hasattr(httpx, 'main'))"
    assert output("-c", look) == "libp2p.transport.quic.transport True"
