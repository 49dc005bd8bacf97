"""Fixtures of the worker's tests: models built once per session, and real worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.engine import shared_weights
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.gguf_file import GgufFile

from .client import Worker
from .factory import SPECS, Spec, build

MakeModel = Callable[[str | Spec], Path]
StartWorker = Callable[..., Worker]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`make_model("qwen2")` or `make_model(Spec(...))`: the path of a random model."""
    folder = tmp_path_factory.mktemp("models")
    built: dict[str, Path] = {}

    def make(spec: str | Spec) -> Path:
        key = spec if isinstance(spec, str) else repr(spec)
        if key not in built:
            chosen = SPECS[spec] if isinstance(spec, str) else spec
            built[key] = build(folder / f"{len(built)}-{chosen.architecture}.gguf", chosen)
        return built[key]

    return make


@pytest.fixture(scope="module")
def vocabulary(make_model: MakeModel) -> Iterator[Vocabulary]:
    """256 single bytes and a few special tokens."""
    path = make_model("llama")
    model = Model(path, vocab_only=True)
    yield Vocabulary(model, GgufFile(path))
    model.close()


@pytest.fixture
def segment_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run from segment files, as where libllama does not tell where its tensors are."""
    monkeypatch.setattr(shared_weights, "is_supported", lambda: False)


@pytest.fixture
def start_worker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartWorker]:
    """`start_worker()`: a running worker process and the daemon's end of its socket. A module that says
    IS_FORKED = False gets real ones, others forks."""
    workers: list[Worker] = []
    is_forked = getattr(request.module, "IS_FORKED", True)

    def start(*arguments: str) -> Worker:
        path = tmp_path / f"worker-{len(workers)}.sock"
        worker = Worker(path, arguments, is_forked=is_forked)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(start_worker: StartWorker) -> Worker:
    return start_worker()
