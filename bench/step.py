"""Where the time of one decode step of a lone stream goes, in the worker.

    python -m bench.step --model 0.5b
    python -m bench.step --model 0.6b-q4_k_m --threads 2

A worker's engine and scheduler in this process, as a worker has them: a request generates, each token becomes
a message that is written to a socket. The step is timed from round to round, and in it libllama, choosing the
token, and making and writing the message. What libllama does is taken apart in a second context over the same
file: its callback is asked for every node of the graph, which is then computed by itself. What a node takes
that computes nothing (a view) is subtracted from each; the parts are then scaled to what libllama takes
where nobody asks, so what it does beside the nodes is in them. Times are medians, of processor time with one
thread, by the clock with more.

"weights" are products with matrices of the model, "attention" what multiplies with keys and values, "KV" what
writes them and reads the embedding, "other nodes" norms, rotations, sums and activations.
"""

from __future__ import annotations

import swarmllm_workers  # noqa: F401  isort: skip  (its kernels stand before libllama)

import argparse
import ctypes
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from bench.common.figures import RESULTS, machine, threads_suffix
from bench.common.models import MODELS, bench_model
from swarmllm_proto.codec import encode_ipc
from swarmllm_proto.ipc import Generate, Sampling
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.libllama import N_BATCH, Context, ContextSettings, Model
from swarmllm_workers.engine.tap import ggml
from swarmllm_workers.kernels.kernel_tuning import KernelTuning
from swarmllm_workers.schedule.generate_work import GenerateWork
from swarmllm_workers.schedule.planner import Planner
from swarmllm_workers.schedule.scheduler import Scheduler
from swarmllm_workers.server.loop import OutgoingFrames

N_CTX: Final = 2048
N_WARM_UP: Final = 16
VIEWS: Final = ("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE", "NONE")
KEYS_AND_VALUES: Final = ("SET_ROWS", "GET_ROWS", "CPY")
INSIDE: Final = ("weights", "attention", "KV", "other nodes")


_TEXT = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)
_name_of = _TEXT(("ggml_get_name", ggml))
_operation_of = _TEXT(("ggml_op_desc", ggml))


class Parts:
    """Nanoseconds of each part of the step that is under way, and of all steps before."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.now: defaultdict[str, int] = defaultdict(int)
        self.steps: list[dict[str, int]] = []

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same, with its time added to a part."""

        def timed(*args: Any, **options: Any) -> Any:
            started = self.clock()
            try:
                return call(*args, **options)
            finally:
                self.now[part] += self.clock() - started

        return timed

    def step(self, run: Callable[[], None]) -> None:
        self.now.clear()
        started = self.clock()
        run()
        self.steps.append({**self.now, "step": self.clock() - started})

    def median_ns(self, part: str) -> float:
        return median(step.get(part, 0) for step in self.steps[N_WARM_UP:])


class Nodes:
    """Times each node of a graph by itself."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.sums: defaultdict[str, int] = defaultdict(int)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._clock = clock
        self._from = 0
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, tensor: int, is_question: bool, _user_data: int | None) -> bool:
        now = self._clock()
        if not is_question:
            part = part_of(_operation_of(tensor).decode(), _name_of(tensor).decode())
            self.sums[part] += now - self._from
            self.counts[part] += 1
        self._from = self._clock()
        return True

    def of_step_ns(self, n_steps: int) -> dict[str, float]:
        """Of one step, without what asking for a node takes."""
        asking = self.sums["views"] / max(1, self.counts["views"])
        return {part: max(0.0, self.sums[part] - asking * self.counts[part]) / n_steps for part in INSIDE}


def part_of(operation: str, name: str) -> str:
    if operation in VIEWS:
        return "views"
    if operation in KEYS_AND_VALUES:
        return "KV"
    if operation in ("FLASH_ATTN_EXT", "SOFT_MAX") or name.startswith(("kq", "fattn")):
        return "attention"
    return "weights" if operation in ("MUL_MAT", "MUL_MAT_ID") else "other nodes"


def measure_nodes(
    path: Path, n_prompt: int, n_steps: int, n_threads: int, clock: Callable[[], int]
) -> dict[str, float]:
    """Nanoseconds of a step by part. At the same positions as `measure_step`."""
    model, nodes = Model(path), Nodes(clock)
    settings = ContextSettings(
        n_ctx=N_CTX, n_slots=1, n_threads=n_threads, flash_attention="auto", eval_callback=nodes.callback
    )
    context = Context(model, settings)
    prompt = np.arange(n_prompt, dtype=np.int32) % 250
    context.decode(prompt, np.arange(n_prompt), 0, np.zeros(n_prompt, np.int8))
    for i in range(n_steps):
        if i == N_WARM_UP:
            nodes.sums.clear()
            nodes.counts.clear()
        context.decode(prompt[i % n_prompt :][:1], n_prompt + i, 0, True)
    context.close()
    model.close()
    return nodes.of_step_ns(n_steps - N_WARM_UP)


def measure_step(
    path: Path, folder: Path, n_prompt: int, n_steps: int, n_threads: int, clock: Callable[[], int]
) -> Parts:
    settings = EngineSettings(n_ctx=N_CTX, n_slots=1, n_threads=n_threads, flash_attention="auto")
    engine = Engine(path, folder, settings)
    engine.layers.load(0, engine.n_layers)
    tuning = KernelTuning()
    tuning.tune(tuning.read([path]), n_threads)
    ours, daemons = socket.socketpair()
    for end in (ours, daemons):
        end.setblocking(False)
    outgoing, errors = OutgoingFrames(ours), list[Exception]()
    scheduler = Scheduler(engine, Planner(), lambda _work, error: errors.append(error))
    parts = Parts(clock)

    def send(message: Any, payload: Any = b"") -> None:
        outgoing.send(encode_ipc(message, payload))

    Context.decode = parts.timed(Context.decode, "libllama")  # type: ignore[method-assign]
    Decoding.decode = parts.timed(Decoding.decode, "token")  # type: ignore[method-assign]
    sampling = Sampling(max_tokens=n_steps, temperature=0.8, top_k=40, top_p=0.95, seed=1, ignore_eos=True)
    prompt = np.arange(n_prompt, dtype=np.int32) % 250
    message = Generate(id=1, request_id="step", sampling=sampling)
    scheduler.add(GenerateWork(message, prompt, engine, parts.timed(send, "message")))
    while scheduler.works:
        parts.step(scheduler.step)
        with suppress(BlockingIOError):  # A piece of a prompt makes no message.
            daemons.recv(2**20)
    if errors:
        raise errors[0]
    ours.close()
    daemons.close()
    return parts


def report(parts: Parts, nodes_ns: dict[str, float]) -> str:
    step_ns, libllama_ns = parts.median_ns("step"), parts.median_ns("libllama")
    scale = libllama_ns / sum(nodes_ns.values())
    rows = [(name, nodes_ns[name] * scale) for name in INSIDE]
    rows.append(("choosing the token", parts.median_ns("token")))
    rows.append(("making and writing the message", parts.median_ns("message")))
    rows.append(("the rest of the worker", step_ns - sum(ns for _, ns in rows)))
    rows.append(("the step", step_ns))
    lines = [f"| {name} | {ns / 1000:.1f} | {ns / step_ns:.1%} |" for name, ns in rows]
    return "\n".join(["| part | us | of the step |", "|---|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="guide")
    parser.add_argument("--steps", type=int, default=200, help="tokens; the first 16 do not count")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before them")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if not 1 <= arguments.prompt <= N_BATCH:
        parser.error(f"a prompt has 1 to {N_BATCH} tokens")
    if not N_WARM_UP < arguments.steps <= N_CTX - arguments.prompt:
        parser.error(f"steps are more than {N_WARM_UP}, and with the prompt at most {N_CTX}")
    clock = time.thread_time_ns if arguments.threads == 1 else time.perf_counter_ns
    path = bench_model(arguments.model).gguf
    sizes = arguments.prompt, arguments.steps, arguments.threads
    with tempfile.TemporaryDirectory() as folder:
        parts = measure_step(path, Path(folder), *sizes, clock)
    text = report(parts, measure_nodes(path, *sizes, clock))
    print(text)
    command = (
        f"python -m bench.step --model {arguments.model} --steps {arguments.steps} "
        f"--threads {arguments.threads}"
    )
    name = f"step-{arguments.model}{threads_suffix(arguments.threads)}.md"
    (RESULTS / name).write_text(f"`{command}` on {machine()}\n\n{text}\n")


if __name__ == "__main__":
    main()
