"""What a grammar costs is paid by its own request: in a real worker, with grammars made to hang it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import DEADLINE_S

from swarmllm_proto import ipc
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import encode_tensor

from .client import Worker
from .test_exactness import GUIDE

PROMPT = np.arange(5, 25, dtype=np.int32)
AMBIGUOUS = """root ::= a a
a ::= b b | "x"
b ::= c c | "x"
c ::= d d | "x"
d ::= e e | "x"
e ::= f f | "x"
f ::= g g | "x"
g ::= "x"?
"""
WIDE = "root ::= (w)*\nw ::= " + " | ".join("[a-z]* [a-z]*" for _ in range(200))
SLOW_TO_COMPILE = {"type": "integer", "multipleOf": 999983}
LARGE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(5000)},
    "required": [f"p{i}" for i in range(5000)],
}
HANGING = {
    "an ambiguous grammar": Sampling(grammar=AMBIGUOUS, temperature=0.0),
    "a wide grammar": Sampling(grammar=WIDE, temperature=0.0),
    "a schema that compiles for long": Sampling(json_schema=json.dumps(SLOW_TO_COMPILE)),
    "a large schema": Sampling(json_schema=json.dumps(LARGE)[:65536]),
    "a pattern of many stars": Sampling(
        json_schema=json.dumps({"type": "string", "pattern": "^" + ".*" * 100 + "$"}), temperature=0.0
    ),
}


def test_a_child_has_so_much_memory_and_no_more() -> None:
    """Before it reads anything."""
    script = """
import os
from swarmllm_workers.grammars.process import MEMORY_MAX, run_child

class Greedy:
    @property
    def model(self):
        bytearray(MEMORY_MAX // 2)
        try:
            bytearray(2 * MEMORY_MAX)
        except MemoryError:
            os._exit(7)
        os._exit(1)

run_child(0, Greedy())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=DEADLINE_S, check=False).returncode == 7


@pytest.fixture
def loaded(worker: Worker) -> Worker:
    worker.open(GUIDE, (0, 12), n_slots=4)
    warm = Sampling(json_schema='{"type":"boolean"}', temperature=0.0, max_tokens=8)
    assert worker.generate(PROMPT, sampling=warm).text in (b"true", b"false")
    return worker


def begin(worker: Worker, request_id: str, sampling: Sampling) -> int:
    call_id: int = worker.send(ipc.Generate, encode_tensor(PROMPT), request_id=request_id, sampling=sampling)
    return call_id


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGING)
def test_a_grammar_that_hangs_ends_its_own_request_and_delays_no_other(loaded: Worker, name: str) -> None:
    hanging = begin(loaded, "hanging", HANGING[name])
    other = begin(loaded, "other", Sampling(temperature=0.0, max_tokens=12, ignore_eos=True))
    order, error = [], None
    while len(order) < 2:
        message = loaded.receive_any().message
        if isinstance(message, ipc.Error):
            assert message.id == hanging
            error = message
        if isinstance(message, ipc.Error | ipc.GenerateDone):
            order.append(message.id)
    assert error is not None
    assert error.kind in ("bad_message", "too_complex")
    assert error.field in ("sampling.grammar", "sampling.json_schema")
    if name != "a large schema" and "pattern" not in name:  # these are refused at once
        assert order == [other, hanging]
    again = loaded.generate(PROMPT, sampling=Sampling(temperature=0.0, max_tokens=4))
    assert again.tokens


@pytest.mark.slow
def test_a_check_says_what_is_wrong_and_others_go_on_meanwhile(loaded: Worker) -> None:
    sampling = Sampling(json_schema=json.dumps(SLOW_TO_COMPILE))
    check = loaded.send(ipc.CheckGrammar, sampling=sampling)
    other = begin(loaded, "other", Sampling(temperature=0.0, max_tokens=12, ignore_eos=True))
    order: list[Any] = []
    while len(order) < 2:
        message = loaded.receive_any().message
        if isinstance(message, ipc.Error | ipc.GenerateDone):
            order.append(message)
    assert [each.id for each in order] == [other, check]
    assert order[1].field == "sampling.json_schema"
    assert "too complex" in order[1].message


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(grammar="root ::= nothing"), "sampling.grammar"),
        (Sampling(json_schema='{"type": "dance"}'), "sampling.json_schema"),
        (Sampling(grammar='root ::= "a"', json_schema="{}"), "sampling.grammar"),
        (Sampling(grammar='root ::= "a"'), None),
        (Sampling(json_schema='{"type": "object"}', json_before="<tool_call>\n"), None),
        (Sampling(), None),
    ],
)
def test_a_check_answers_before_anything_is_computed(loaded: Worker, sampling: Sampling, field: str) -> None:
    check = loaded.send(ipc.CheckGrammar, sampling=sampling)
    answer = loaded.receive_any().message
    assert answer.id == check
    assert getattr(answer, "field", None) == field


@pytest.mark.slow
def test_the_grammar_process_may_die(loaded: Worker) -> None:
    """Its requests fail; the next one has another."""
    pid = loaded.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children
    for child in map(int, children):
        alive = os.pidfd_open(child)
        os.kill(child, signal.SIGKILL)
        assert select.select([alive], [], [], DEADLINE_S)[0], "its end is seen before anything is asked"
        os.close(alive)
    sampling = Sampling(json_schema='{"type":"boolean"}', temperature=0.0, max_tokens=8)
    texts = []
    for _ in range(2):
        begin(loaded, "again", sampling)
        texts.append(b"")
        while not isinstance((answer := loaded.receive_any()).message, ipc.GenerateDone | ipc.Error):
            texts[-1] += bytes(answer.payload)
    assert texts[-1] in (b"true", b"false")
