"""What a picture costs until the first token: against libmtmd in one process, cut, and encoded elsewhere.

    python -m bench.vision --rounds 3

The guide with a random projector as large as SigLIP-B (86 million parameters, 576 rows), over daemons on
loopback: one node, two nodes that share the layers, and a node whose pictures another one encodes. Each round
has a picture of its own, which libmtmd gets right before the nodes; the second turn asks about it again.
`--encoder guide`: with the guide's own projector, which encodes in milliseconds.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gguf import GGUFWriter
from PIL import Image

from bench.common.figures import Figure, publish, ratios
from bench.common.streamed import cpu_s
from bench.common.swarm_nodes import demo_nodes, is_complete, wait_for
from bench.vision_uncut import N_BATCH, N_CTX, PROMPT
from swarmllm.cli.client import Client
from swarmllm.cli.demo import DemoNodes
from swarmllm.guide import GUIDE_PATH, PROJECTOR_PATH
from swarmllm.operating_system import family

CACHE = Path(__file__).parent / "cache"
N_EMBD, N_LAYERS = 256, 12
"""Of the guide."""
WIDTH, N_FF, DEPTH, IMAGE, PATCH = 768, 3072, 12, 384, 16
SIZE = 640, 480
ROWS = 36
"""Of a picture, in the projector that makes the fewest."""
ANSWER_S = 300.0
MEASURED = "first token", "processor time to it"

Rows = list[tuple[Figure, Figure | None]]


def siglip_b() -> Path:
    """A random projector of SigLIP-B's size in f16, made once."""
    path = CACHE / "siglip-b-f16.gguf"
    if path.exists():
        return path
    CACHE.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "clip", use_temp_file=False)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "janus_pro")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "embedding_length": WIDTH,
        "feed_forward_length": N_FF,
        "block_count": DEPTH,
        "projection_dim": N_EMBD,
        "image_size": IMAGE,
        "patch_size": PATCH,
        "attention.head_count": 12,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def matrix(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) * np.prod(shape[1:]) ** -0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def vector(name: str, size: int, value: float = 0.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("v.patch_embd", WIDTH, 3, PATCH, PATCH)
    vector("v.patch_embd.bias", WIDTH)
    positions = rng.standard_normal(((IMAGE // PATCH) ** 2, WIDTH), np.float32)
    writer.add_tensor("v.position_embd.weight", positions * np.float32(0.3))
    for i in range(DEPTH):
        block = f"v.blk.{i}"
        for norm in ("ln1", "ln2"):
            vector(f"{block}.{norm}.weight", WIDTH, 1.0)
            vector(f"{block}.{norm}.bias", WIDTH)
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            matrix(f"{block}.{part}", WIDTH, WIDTH)
            vector(f"{block}.{part}.bias", WIDTH)
        matrix(f"{block}.ffn_up", N_FF, WIDTH)
        vector(f"{block}.ffn_up.bias", N_FF)
        matrix(f"{block}.ffn_down", WIDTH, N_FF)
        vector(f"{block}.ffn_down.bias", WIDTH)
    vector("v.post_ln.weight", WIDTH, 1.0)
    vector("v.post_ln.bias", WIDTH)
    matrix("mm.0", N_EMBD, WIDTH)
    vector("mm.0.bias", N_EMBD)
    matrix("mm.1", N_EMBD, N_EMBD)
    vector("mm.1.bias", N_EMBD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pictures(n: int) -> list[Path]:
    CACHE.mkdir(exist_ok=True)
    paths = []
    for seed in range(n):
        coarse = np.random.default_rng(seed).integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), np.uint8)
        paths.append(CACHE / f"picture-{seed}.png")
        Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(paths[-1])
    return paths


class Node:
    """The one that is asked, among others."""

    def __init__(self, client: Client, nodes: DemoNodes) -> None:
        self._client, self._nodes = client, nodes

    def first_token(self, path: Path, more: str = "") -> tuple[float, dict[str, Any]]:
        """Milliseconds; the answer has one token."""
        shown = base64.b64encode(path.read_bytes()).decode()
        prompt = {"prompt_string": PROMPT + more, "multimodal_data": [shown]}
        body = {"model": "guide", "prompt": prompt, "n_predict": 1, "temperature": 0, "ignore_eos": True}
        url = f"{self._client.api_url}/completion"
        start_s = time.perf_counter()
        answer = httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False).raise_for_status().json()
        return (time.perf_counter() - start_s) * 1000, dict(answer)

    def cpu_s(self) -> float:
        """What all nodes, with their workers, have had of the processor."""
        pids = {mark.pid for node in self._nodes.nodes for mark in family(node.process.pid)}
        return sum(map(cpu_s, pids))

    def n_bytes(self) -> int:
        """To and from other nodes."""
        peers = self._client.get("/api/admin/peers")["peers"]
        return sum(int(each["bytes_sent"]) + int(each["bytes_received"]) for each in peers)


@contextmanager
def nodes_of(layers: Sequence[str], encoder: int, mmproj: Path, n_threads: int) -> Iterator[Node]:
    """A node for each of `layers` ("": none), of which the first is asked, and that with the number
    `encoder` encodes pictures."""
    with demo_nodes() as nodes, ExitStack() as stack:
        clients: list[Client] = []
        bootstrap: list[str] = []
        inference = {"n_threads": n_threads, "n_ctx": N_CTX, "prefill_chunk_tokens": N_BATCH}
        for index, _ in enumerate(layers):
            node = nodes.start(f"n{index + 1}", [], bootstrap, inference)
            told = wait_for(node.announcement, f"{node.name} to start")
            clients.append(stack.enter_context(Client(told["api_url"])))
            bootstrap = bootstrap or list(told["addresses"])
        for index, (client, held) in enumerate(zip(clients, layers, strict=True)):
            # Without a projector of its own a node would take the one that lies beside the guide.
            body = {"path": str(GUIDE_PATH), "name": "guide", "mmproj": str(mmproj)}
            for _ in client.post_progress("/api/admin/models", body):
                pass
            if index != encoder:
                client.post("/api/admin/models/guide/unload", {"layers": "mmproj"})
            for _ in client.post_progress("/api/admin/models/guide/load", {"layers": held}) if held else ():
                pass
        wait_for(lambda: is_complete(clients[0], "guide"), "a pipeline")
        first = Node(clients[0], nodes)
        wait_for(lambda: sees(first), "an encoder")
        yield first


def sees(node: Node) -> bool:
    """One picture that no round shows, too: it starts processes and opens the projector."""
    try:
        node.first_token(pictures(1)[0])
    except httpx.HTTPStatusError:
        return False
    return True


LAYOUTS = {
    "one node": ([f"0:{N_LAYERS}"], 0),
    "two nodes": ([f"0:{N_LAYERS // 2}", f"{N_LAYERS // 2}:{N_LAYERS}"], 0),
    "one node, encoded by another": ([f"0:{N_LAYERS}", ""], 1),
}


@contextmanager
def one_process(mmproj: Path, n_threads: int) -> Iterator[Callable[[Path], tuple[float, float]]]:
    """libmtmd and libllama in a process that stays: milliseconds of a picture, and of the processor."""
    command = [sys.executable, "-m", "bench.vision_uncut", str(GUIDE_PATH), str(mmproj), str(n_threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def first_token(path: Path) -> tuple[float, float]:
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            took_ms, cpu_ms = json.loads(process.stdout.readline())
            return took_ms, cpu_ms

        first_token(pictures(1)[0])
        try:
            yield first_token
        finally:
            process.stdin.close()


def measure(name: str, mmproj: Path, shown: Sequence[Path], n_threads: int) -> Rows:
    """Of one layout: each round asks the one process, then the nodes, then these for a second turn."""
    layers, encoder = LAYOUTS[name]
    rival, rival_cpu = (Figure(f"libmtmd in one process: {what}", "ms") for what in MEASURED)
    first, first_cpu = (Figure(f"{name}: {what}", "ms") for what in MEASURED)
    again = Figure(f"{name}: second turn", "ms")
    on_wire = Figure(f"{name}: between the nodes for a new picture", "kB")
    with nodes_of(layers, encoder, mmproj, n_threads) as node, one_process(mmproj, n_threads) as uncut:
        for path in shown:
            took_ms, took_cpu_ms = uncut(path)
            rival.values.append(took_ms)
            rival_cpu.values.append(took_cpu_ms)
            before, before_s = node.n_bytes(), node.cpu_s()
            first.values.append(node.first_token(path)[0])
            first_cpu.values.append((node.cpu_s() - before_s) * 1000)
            on_wire.values.append((node.n_bytes() - before) / 1000)
            assert len(layers) == 1 or on_wire.values[-1] > ROWS * N_EMBD * 4 / 1000, "the other took no part"
            again.values.append(node.first_token(path, " And what is on the left?")[0])
    rows: Rows = [(rival, None), (first, ratios(first, rival))]
    rows += [(rival_cpu, None), (first_cpu, ratios(first_cpu, rival_cpu)), (again, ratios(first, again))]
    return rows + ([(on_wire, None)] if len(layers) > 1 else [])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--encoder", choices=("siglip-b", "guide"), default="siglip-b")
    arguments = parser.parse_args()
    mmproj = siglip_b() if arguments.encoder == "siglip-b" else PROJECTOR_PATH
    shown = pictures(arguments.rounds + 1)[1:]
    rows: Rows = []
    for name in LAYOUTS:
        rows += measure(name, mmproj, shown, arguments.threads)
    said = f"python -m bench.vision --rounds {arguments.rounds} --threads {arguments.threads}"
    suffix = "" if arguments.encoder == "siglip-b" else f"-{arguments.encoder}"
    publish(f"vision{suffix}", f"{said} --encoder {arguments.encoder}", rows)


if __name__ == "__main__":
    main()
