"""A real worker process over a real Unix socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.tensors import decode_tensor, encode_tensor

from .client import DEADLINE_S, GREEDY, Worker, worker_command, worker_environment
from .conftest import MakeModel
from .factory import SPECS, special
from .test_exactness import GUIDE

pytestmark = pytest.mark.slow

IS_FORKED = False

PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)


def forward_through(
    worker: Worker, bounds: list[int], data: np.ndarray, position: int, **fields: object
) -> ipc.Token:
    """One step of a request through stages with these boundaries; the last gives a token."""
    for start, end in pairwise(bounds[:-1]):
        data = worker.hidden(data, request_id="r", start=start, end=end, position=position)
    answer = worker.forward(
        data, request_id="r", start=bounds[-2], end=bounds[-1], position=position, want="token", **fields
    )
    assert isinstance(answer.message, ipc.Token)
    return answer.message


def memory_bytes(pid: int) -> int:
    """Proportional set size: what this process costs the system, mapped files included."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in smaps_rollup")


def test_worker_introduces_itself(worker: Worker) -> None:
    assert worker.ready.pid == worker.process.pid
    assert "llama-cpp-python" in worker.ready.engine


def test_open_describes_the_model_and_loads_no_layer(worker: Worker, make_model: MakeModel) -> None:
    opened = worker.open(make_model("gemma2"))
    spec = SPECS["gemma2"]
    assert (opened.architecture, opened.n_layers, opened.n_embd) == ("gemma2", spec.n_layers, spec.n_embd)
    assert opened.cut_alignment == 1
    assert special("<|im_end|>") in opened.eos_tokens
    assert not opened.has_chat_template
    assert (
        worker.refused(
            ipc.Forward, encode_tensor(PROMPT), request_id="r", start=0, end=2, position=0, want="hidden"
        ).kind
        == "not_loaded"
    )


def test_greedy_text_equals_libllama_on_the_same_file(worker: Worker) -> None:
    """The bundled model, whole, and through three stages of forwards."""
    messages = [{"role": "user", "content": "What is a pipeline?"}]
    worker.open(GUIDE, (0, 12), n_ctx=512)
    tokens = worker.tokenize(messages=messages)
    sampling = ipc.Sampling(temperature=0.0, max_tokens=48)
    generated = worker.generate(tokens, sampling=sampling)

    reference = llama_cpp.Llama(str(GUIDE), n_ctx=512, n_batch=128, n_threads=1, verbose=False)
    chat = reference.create_chat_completion(messages, temperature=0.0, max_tokens=48)
    expected_tokens = []
    for token in reference.generate(tokens.tolist(), temp=0.0, reset=True):
        expected_tokens.append(token)
        if len(expected_tokens) == len(generated.tokens):
            break
    assert generated.tokens == expected_tokens
    assert generated.text.decode() == chat["choices"][0]["message"]["content"]
    assert generated.done.finish_reason == chat["choices"][0]["finish_reason"]
    assert generated.done.n_prompt_tokens == len(tokens) == chat["usage"]["prompt_tokens"]
    reference.close()

    chained: list[int] = []
    data, position = tokens, 0
    for _ in generated.tokens:
        fields = {"sampling": sampling, "n_prompt_tokens": len(tokens)}
        token = forward_through(worker, [0, 4, 8, 12], data, position, **fields)
        chained.append(token.token)
        position += len(data)
        data = np.array([token.token], np.int32)
    assert chained == generated.tokens
    assert token.finish_reason == generated.done.finish_reason


def test_requests_generate_in_turns_and_like_alone(worker: Worker, make_model: MakeModel) -> None:
    """Two generations that run together give what each gives alone, and their tokens arrive interleaved."""
    worker.open(make_model("qwen2"), (0, 4), n_ctx=256)
    prompts = {"a": PROMPT, "b": np.arange(60, 90, dtype=np.int32)}
    alone = {name: worker.generate(prompt, name).tokens for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        worker.send(ipc.Generate, encode_tensor(prompt), request_id=name, sampling=GREEDY)
    together: dict[str, list[int]] = {name: [] for name in prompts}
    order, n_done = [], 0
    while n_done < 2:
        message = worker.receive_any().message
        if isinstance(message, ipc.GenerateDone):
            n_done += 1
        else:
            assert isinstance(message, ipc.Token), message
            together[message.request_id].append(message.token)
            order.append(message.request_id)
    assert together == alone
    assert order.index("b") < len(alone["a"]), "the second request waited for the first to end"


def test_cancelled_generation_ends_and_frees_its_slot(worker: Worker, make_model: MakeModel) -> None:
    worker.open(make_model("llama"), (0, 4), n_ctx=4096, n_slots=1)
    endless = ipc.Sampling(temperature=0.0, max_tokens=4000, ignore_eos=True)
    worker.send(ipc.Generate, encode_tensor(PROMPT), request_id="long", sampling=endless)
    worker.receive(ipc.Token)
    cancel = worker.send(ipc.CancelRequest, request_id="long")
    while isinstance(message := worker.receive_any().message, ipc.Token):
        pass
    assert isinstance(message, ipc.GenerateDone)
    assert message.finish_reason == "cancelled"
    assert 1 <= message.n_generated < 4000
    assert worker.receive(ipc.Done).id == cancel
    assert len(worker.generate(PROMPT, "next").tokens) == GREEDY.max_tokens


def test_other_messages_are_served_between_the_chunks_of_a_prefill(
    worker: Worker, make_model: MakeModel
) -> None:
    worker.open(make_model("llama"), (0, 4), n_ctx=4096)
    prompt = np.resize(PROMPT, 2000)
    generate = worker.send(ipc.Generate, encode_tensor(prompt), request_id="r", sampling=GREEDY)
    embed = worker.send(ipc.Embed, encode_tensor(PROMPT))
    assert worker.receive_any().message.id == embed, "Embed waited for the whole prompt"
    assert worker.receive(ipc.Token).id == generate


def test_layers_load_with_progress_and_unload_until_the_worker_leaves(
    worker: Worker, make_model: MakeModel
) -> None:
    path = make_model("llama")
    worker.open(path)
    worker.send(ipc.Load, start=1, end=3)
    progress = []
    while isinstance(message := worker.receive_any().message, ipc.Progress):
        progress.append(message)
    assert isinstance(message, ipc.Loaded)
    assert message.ranges == ((1, 3),)
    assert progress
    assert progress[-1].done_bytes == progress[-1].total_bytes > 0
    half = message.weights_bytes
    more = worker.call(ipc.Load, start=0, end=4).message
    assert more.ranges == ((0, 4),)
    assert more.weights_bytes > half
    less = worker.call(ipc.Unload, start=0, end=2).message
    assert less.ranges == ((2, 4),)
    assert less.weights_bytes < more.weights_bytes
    assert worker.refused(ipc.Unload, start=0, end=1).kind == "not_loaded"
    assert worker.call(ipc.Unload, start=0, end=4).message.ranges == ()
    worker.receive(ipc.Bye)
    assert worker.process.wait(DEADLINE_S) == 0


def test_shutdown_says_goodbye_and_ends_the_process(worker: Worker) -> None:
    assert isinstance(worker.call(ipc.Shutdown).message, ipc.Bye)
    assert worker.process.wait(DEADLINE_S) == 0


def test_memory_returns_to_the_system_on_unload(worker: Worker, tmp_path: Path) -> None:
    """A model of 200 MB in two halves; not memory-mapped, so that nothing hides in the page cache."""
    from bench.common.shapes import Shape, build

    shape = Shape(n_layers=12, n_embd=1024, n_heads=8, n_kv_heads=4, n_ff=4096, n_vocab=512)
    path = build(shape, tmp_path / "big.gguf")
    half = path.stat().st_size // 2
    assert half > 90e6
    worker.open(path, use_mmap=False, n_ctx=512)
    empty = memory_bytes(worker.process.pid)
    worker.call(ipc.Load, start=0, end=6)
    # Its cells get their memory after the answer, and before another load begins.
    worker.call(ipc.Load, start=0, end=6)
    one = memory_bytes(worker.process.pid)
    worker.call(ipc.Load, start=6, end=12)
    two = memory_bytes(worker.process.pid)
    worker.hidden(PROMPT, request_id="r", start=0, end=6, position=0)
    worker.call(ipc.Unload, start=0, end=6)
    again = memory_bytes(worker.process.pid)
    assert one - empty > 0.9 * half
    assert two - one > 0.9 * half
    assert two - again > 0.9 * half
    for come, gone in [(0, 6), (6, 0)] * 4:
        worker.call(ipc.Load, start=come, end=come + 6)
        worker.call(ipc.Unload, start=gone, end=gone + 6)
    # What a load leaves beside its half of the weights it leaves once, and not eight times.
    assert memory_bytes(worker.process.pid) - one < 0.5 * half, "memory grows with each load"


def test_mapped_segments_leave_no_memory_behind_either(worker: Worker, tmp_path: Path) -> None:
    from bench.common.shapes import Shape, build

    shape = Shape(n_layers=8, n_embd=1024, n_heads=8, n_kv_heads=4, n_ff=4096, n_vocab=512)
    path = build(shape, tmp_path / "big.gguf")
    worker.open(path, (0, 4), (4, 8), n_ctx=512)
    worker.hidden(PROMPT, request_id="r", start=0, end=4, position=0)
    loaded = memory_bytes(worker.process.pid)
    worker.call(ipc.Unload, start=0, end=4)
    assert loaded - memory_bytes(worker.process.pid) > 0.4 * path.stat().st_size


def test_worker_ends_when_the_daemon_closes_the_socket(worker: Worker, make_model: MakeModel) -> None:
    worker.open(make_model("llama"), (0, 4), n_ctx=4096)
    endless = ipc.Sampling(temperature=0.0, max_tokens=4000, ignore_eos=True)
    worker.send(ipc.Generate, encode_tensor(PROMPT), request_id="r", sampling=endless)
    worker.receive(ipc.Token)
    worker.socket.close()
    worker.process.wait(DEADLINE_S)


PARENT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:])
print(process.pid, flush=True)
process.wait()
"""


def test_no_orphan_is_left_when_the_daemon_is_killed(tmp_path: Path) -> None:
    """The worker's parent dies by SIGKILL while somebody else keeps the socket open."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        listener.settimeout(DEADLINE_S)
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *worker_command(tmp_path / "s")],
            env=worker_environment(),
            stdout=subprocess.PIPE,
        )
        connection, _ = listener.accept()
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        ended, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        os.close(descriptor)
        connection.close()
    assert ended, "the worker outlived its parent"


def test_interrupt_at_the_terminal_is_left_to_the_daemon(worker: Worker) -> None:
    worker.process.send_signal(signal.SIGINT)
    assert isinstance(worker.call(ipc.Shutdown).message, ipc.Bye)


def test_slow_reader_gets_every_token(worker: Worker, make_model: MakeModel) -> None:
    """More output than the socket holds, unread until all is asked for: nothing is lost or reordered."""
    worker.open(make_model("llama"), (0, 2), (2, 4), n_ctx=8192, n_slots=1)
    rows = np.zeros((2048, 64), np.float32)
    ids = [
        worker.send(
            ipc.Forward, encode_tensor(rows), request_id="r", start=0, end=2, position=0, want="hidden"
        )
        for _ in range(4)
    ]
    for call_id in ids:
        answer = worker.receive_any()
        assert answer.message.id == call_id
        assert decode_tensor(answer.payload).shape == rows.shape


def test_unreadable_stream_ends_the_worker_with_a_reason(worker: Worker) -> None:
    worker.socket.sendall(b"\xff" * 64)
    error = worker.receive(ipc.Error)
    assert error.fatal
    assert error.field == "header"
    assert worker.process.wait(DEADLINE_S) == 0


def test_threads_that_take_every_core_are_kept_to_one_each(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("there is one core")
    worker = Worker(tmp_path / "socket", ["--threads", str(len(cores))], is_forked=False)
    try:
        worker.open(GUIDE, (0, 12), n_threads=len(cores))
        worker.generate(worker.tokenize(text="What is a pipeline?"))
        tasks = [int(task.name) for task in Path(f"/proc/{worker.process.pid}/task").iterdir()]
        kept = [os.sched_getaffinity(task) for task in tasks]
        assert os.sched_getaffinity(worker.process.pid) == {min(cores)}
        assert {min(one) for one in kept if len(one) == 1} == cores
        assert kept.count(cores) >= 2, "the threads beside it share the core of the one that decodes"
    finally:
        worker.close()


def test_a_conversation_goes_through_another_template_where_one_is_sent(
    worker: Worker, make_model: MakeModel
) -> None:
    worker.open(make_model("llama"), (0, 1))
    messages = [{"role": "user", "content": "Hello"}]
    for n in range(12):
        template = "{{ messages[0].content }}" + "!" * n
        tokens = worker.tokenize(messages=messages, template=template)
        assert bytes(tokens.tolist()) == b"Hello" + b"!" * n
    own = worker.tokenize(messages=messages)
    assert len(own) > len("Hello")
    refused = worker.refused(ipc.Tokenize, messages=messages, template="{% if %}")
    assert refused.kind == "bad_template"
