"""Layers of a stored model move to segment files: each byte lies in one place, and nothing is ever lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.models import CatalogueEntry, build_manifest
from swarmllm.models.model_files import FileState
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_proto.segment_names import FOLDER
from swarmllm_workers.engine import container_segments, segment_file
from swarmllm_workers.engine.container_segments import ContainerSegments
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

from .conftest import MakeModel
from .factory import Spec, build

N_LAYERS = 6
RANGES = [(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1) if (a, b) != (0, N_LAYERS)]


class Container:
    """A model in a folder as the store has it, and what it should hold."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "model.gguf"
        shutil.copyfile(model, self.path)
        self.manifest = build_manifest(model)
        self.tensors = self.manifest.tensors
        self.data = model.read_bytes()
        self.mtime_ns = self.path.stat().st_mtime_ns

    @property
    def entry(self) -> CatalogueEntry:
        names = frozenset(tensor.name for tensor in self.tensors)
        state = FileState.of(self.path.stat())
        return CatalogueEntry("0" * 64, "model", self.path, self.manifest, state, names)

    def home(self) -> ContainerSegments:
        return ContainerSegments(self.path.parent / FOLDER, GgufFile(self.path), N_LAYERS)

    def check(self, places: TensorLocations | None = None) -> None:
        """Everything can be read, wherever it lies; nobody sees that the file was written to."""
        places = places or TensorLocations(self.entry)
        for tensor in self.tensors:
            there = self.data[tensor.offset : tensor.offset + tensor.size_bytes]
            assert places.read(tensor, 0, tensor.size_bytes) == there, tensor.name
        assert self.path.stat().st_mtime_ns == self.mtime_ns

    @property
    def allocated_bytes(self) -> int:
        files = [self.path, *(self.path.parent / FOLDER).glob("*")]
        return sum(file.stat().st_blocks * 512 for file in files)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of some pages each, so that holes take what is in them."""
    return build(
        tmp_path_factory.mktemp("home") / "model.gguf",
        Spec("llama", n_embd=128, n_ff=512, n_layers=N_LAYERS),
    )


ARCHITECTURE = ARCHITECTURES["llama"]


@settings(max_examples=40)
@given(steps=st.lists(st.one_of(st.just("whole"), st.sampled_from(RANGES)), max_size=6))
def test_whatever_is_loaded_nothing_is_lost_and_nothing_lies_there_twice(
    steps: list[Any], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    container = Container(tmp_path_factory.mktemp("container"), model)
    home, places = container.home(), TensorLocations(container.entry)
    before = container.allocated_bytes
    for step in steps:
        if step == "whole":
            assert home.whole().read_bytes() == container.data
            continue
        first, end = step
        path = home.ensure(ARCHITECTURE, first, end)
        cut_from_the_file = container.path.with_name("expected.gguf")
        original = GgufFile(model)
        segment_file.cut(original, ARCHITECTURE, first, end, cut_from_the_file)
        assert path.read_bytes() == cut_from_the_file.read_bytes()
        cut_from_the_file.unlink()
        container.check(places)
        home.settle({step})
        container.check(places)
        if container.allocated_bytes == before:
            continue
        # Tensors that begin or end within a page share it with others, and each file has a header.
        assert container.allocated_bytes < before + 300_000, step
    assert container.home().whole().read_bytes() == container.data


def test_a_layer_that_moved_is_a_hole_in_the_container(model: Path, tmp_path: Path) -> None:
    container = Container(tmp_path / "c", model)
    before = container.path.stat().st_blocks
    home = container.home()
    home.ensure(ARCHITECTURE, 1, N_LAYERS)
    home.settle({(1, N_LAYERS)})
    assert container.path.stat().st_blocks < before * 0.7
    container.check()


@pytest.mark.parametrize("again", [(0, 4), "whole"], ids=str)
def test_a_crash_between_any_two_steps_loses_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Any
) -> None:
    class Killed(BaseException):
        pass

    for step in count(1):
        container = Container(tmp_path / str(step), model)
        home = container.home()
        home.ensure(ARCHITECTURE, 1, 3)
        home.settle({(1, 3)})
        steps_left = count(step - 1, -1)
        is_through = False

        def around(act: Callable[..., Any], left: Iterator[int] = steps_left) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                if next(left) == 0:
                    raise Killed
                return act(*args, **options)

            return counted

        with monkeypatch.context() as patched:
            for name in ("pwrite", "fsync", "utime"):
                patched.setattr(os, name, around(getattr(os, name)))
            patched.setattr(Path, "rename", around(Path.rename))
            patched.setattr(container_segments, "_punch_hole", around(container_segments._punch_hole))
            try:
                if again == "whole":
                    home.whole()
                else:
                    home.ensure(ARCHITECTURE, *again)
                    home.settle({again})
                is_through = True
            except Killed:
                pass
        os.utime(container.path, ns=(container.mtime_ns, container.mtime_ns))
        container.check()
        home = container.home()
        home.settle(())
        container.check()
        assert home.whole().read_bytes() == container.data
        if is_through:
            break
    assert step > 5


def test_bytes_that_somebody_took_away_are_missed_before_they_are_run(model: Path, tmp_path: Path) -> None:
    container = Container(tmp_path / "c", model)
    home = container.home()
    path = home.ensure(ARCHITECTURE, 1, 3)
    home.settle({(1, 3)})
    path.unlink()
    home.ensure(ARCHITECTURE, 3, 5)
    with pytest.raises(CallError, match=r"blk\.1\..* are not in") as caught:
        home.ensure(ARCHITECTURE, 0, 2)
    assert caught.value.kind == "bad_model"


def test_an_engine_computes_the_same_while_layers_move(make_model: MakeModel, tmp_path: Path) -> None:
    """Also while a request still runs in the whole file, which must not change under it."""
    model = make_model("qwen2")
    container = tmp_path / "model.gguf"
    shutil.copyfile(model, container)
    tokens = np.arange(5, 25, dtype=np.int32)

    def logits(path: Path, owns_path: bool) -> list[np.ndarray]:
        engine = Engine(path, tmp_path / FOLDER, EngineSettings(n_ctx=256), owns_path=owns_path)
        engine.layers.load(0, engine.n_layers)
        seen: list[np.ndarray] = []

        def run(request: str, bounds: list[int], position: int, part: np.ndarray) -> None:
            data: np.ndarray = part
            for start, end in pairwise(bounds):
                route = engine.route(request, start, end)
                span = Span(engine.take_slot(request), position, data, "logits")
                (data,) = engine.run(route, [span])
            seen.append(data.copy())

        n = engine.n_layers
        run("first", [0, n], 0, tokens)
        run("second", [0, 2, n], 0, tokens)  # cuts the model, while the first keeps the whole
        run("first", [0, n], len(tokens), tokens[:1])
        engine.release("first")
        run("second", [0, 2, n], len(tokens), tokens[:1])
        engine.release("second")
        engine.layers.unload(2, n)
        engine.layers.unload(0, 2)
        engine.layers.load(0, n)
        run("third", [0, n], 0, tokens)
        engine.close()
        return seen

    expected = logits(model, owns_path=False)
    shutil.rmtree(tmp_path / FOLDER, ignore_errors=True)
    for got, want in zip(logits(container, owns_path=True), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert container.read_bytes() == model.read_bytes()
