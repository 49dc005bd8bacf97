"""A damaged or dishonest GGUF is refused with a typed error, and the worker goes on.

Files of several families are damaged with a fixed seed: cut short, bits flipped in the header, numbers of
the metadata replaced by absurd ones. What libllama would die of is found out in a child process
(`swarmllm_workers.engine.probe`), so these run in the test's own process: an abort would end it.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_workers.engine import probe
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import ARRAY, STRING, GgufFile

from .blueprint import write
from .client import Worker
from .conftest import MakeModel
from .families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.long]

N_FILES = 250
ABSURD = (0, 1, 3, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
TYPED = {"bad_model", "cannot_cut", "out_of_memory", "context_full", "engine"}

Damage = Callable[[random.Random, bytearray, GgufFile], bytearray]


def cut_short(rng: random.Random, data: bytearray, source: GgufFile) -> bytearray:
    return data[: rng.randrange(4, len(data))]


def flip_bytes(rng: random.Random, data: bytearray, source: GgufFile) -> bytearray:
    end = min(tensor.offset for tensor in source.tensors.values())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(end)] = rng.choice((0, 1, 127, 128, 255))
    return data


def absurd_number(rng: random.Random, data: bytearray, source: GgufFile) -> bytearray:
    """One whole number of the architecture's metadata."""
    prefix = source.text("general.architecture").encode()
    keys = [
        key
        for key, value in source.values.items()
        if key.encode().startswith(prefix) and value.type not in (STRING, ARRAY) and len(value.raw) == 4
    ]
    key = rng.choice(keys).encode()
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    data[at : at + 4] = struct.pack("<I", rng.choice(ABSURD))
    return data


def lying_tensor(rng: random.Random, data: bytearray, source: GgufFile) -> bytearray:
    """The first size, the type or the offset of a tensor."""
    name = rng.choice(list(source.tensors)).encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (n_dims,) = struct.unpack_from("<I", data, at)
    place = rng.choice((0, 4, 4 + 8 * n_dims, 8 + 8 * n_dims))
    data[at + place : at + place + 4] = struct.pack("<I", rng.choice(ABSURD))
    return data


DAMAGES: tuple[Damage, ...] = (cut_short, flip_bytes, absurd_number, lying_tensor)


def use(path: Path, folder: Path) -> str:
    """Open the file and run it whole and in two; the kind of the error, or "ran"."""
    tokens = np.arange(3, dtype=np.int32)
    try:
        engine = Engine(path, folder, EngineSettings(n_ctx=64, n_slots=1, n_threads=1))
    except CallError as error:
        return error.kind
    try:
        alignment = engine.rule.cut_alignment
        for bounds in ([0, engine.n_layers], [0, alignment, engine.n_layers] if alignment else []):
            for start, end in pairwise(bounds):
                engine.layers.load(start, end)
            engine.run(engine.route("r", 0, engine.n_layers), [Span(0, 0, tokens, "logits")])
            engine.release("r")
            engine.layers.unload(0, engine.n_layers)
    except CallError as error:
        return error.kind
    finally:
        engine.close()
    return "ran"


def test_damaged_files_are_refused_with_a_kind(tmp_path: Path) -> None:
    rng = random.Random(4)
    sources = [
        GgufFile(write(tmp_path / f"{i}.gguf", FAMILIES[name]))
        for i, name in enumerate(("llama-3.1", "qwen3-moe", "deepseek-v3", "lfm2"))
    ]
    path = tmp_path / "damaged.gguf"
    seen: Counter[str] = Counter()
    for i in range(N_FILES):
        source = rng.choice(sources)
        path.write_bytes(DAMAGES[i % len(DAMAGES)](rng, bytearray(source.path.read_bytes()), source))
        seen[use(path, tmp_path / "segments")] += 1
    assert set(seen) <= TYPED | {"ran"}
    assert seen["bad_model"] > N_FILES // 2
    assert seen["ran"] > 5, "some damage is harmless: else nothing beyond the header was reached"


def test_what_kills_libllama_is_refused_with_its_last_words(tmp_path: Path, make_model: MakeModel) -> None:
    source = GgufFile(write(tmp_path / "good.gguf", FAMILIES["qwen3-moe"]))
    data = bytearray(source.path.read_bytes())
    key = b"qwen3moe.expert_used_count"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = struct.pack("<I", 200)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CallError, match=r"SIGABRT.*n_expert") as caught:
        probe.refuse_what_aborts(path)
    assert caught.value.kind == "bad_model"
    probe.refuse_what_aborts(source.path)


def test_worker_survives_bad_files_and_serves_the_next(
    worker: Worker, make_model: MakeModel, tmp_path: Path
) -> None:
    good = make_model("qwen3moe")
    data = good.read_bytes()
    expert = b"qwen3moe.expert_used_count"
    at = data.index(expert) + len(expert) + 4
    embedding = data.index(b"token_embd.weight") + len(b"token_embd.weight")
    for name, content in {
        "empty": b"",
        "wrong magic": b"GGML" + data[4:],
        "half": data[: len(data) // 2],
        "absurd count": data[:8] + struct.pack("<Q", 2**60) + data[16:],
        "absurd experts": data[:at] + struct.pack("<I", 2**20) + data[at + 4 :],
        "lying size": data[: embedding + 4] + struct.pack("<Q", 2**39) + data[embedding + 12 :],
    }.items():
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        error = worker.refused(ipc.Open, path=str(path), cache_dir=str(tmp_path / "segments"))
        assert (error.kind, error.field) == ("bad_model", "path"), name
        assert ("announces" in error.message) == (name == "absurd count"), (name, error.message)
    worker.open(good, (0, 2))
    assert len(worker.hidden(np.array([1, 2], np.int32), request_id="r", start=0, end=2, position=0)) == 2
