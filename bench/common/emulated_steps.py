"""Workers of a benchmark that sleep until their steps have taken as long as those of a larger model.

Two busy cores cannot be four nodes, but four nodes that sleep most of the time leave the cores to
everything that is measured: who waits for whom, and what handling costs. `emulating` says it to all
processes that are started inside it; a worker hears it through Python's `sitecustomize` and waits at the
end of each step until the step has taken its time.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

ROWS: Final = (0, 1, 2, 3, 4, 5, 8, 16, 64, 512)
STEP_MS: Final = (0.0, 16.2, 19.3, 22.6, 28.1, 33.0, 43.3, 94.2, 259.5, 2227.0)
"""Of so many rows through all layers of the 0.5B shape in Q8_0, one thread: `bench.small_batches` and, for
16 rows, `bench.attention`."""

Changes = dict[str, Callable[[ModuleType], None]]
"""By name: what becomes of a module when it is imported."""


def step_s(n_rows: float) -> float:
    """Seconds of a step through all layers: on the line between two measured row counts."""
    i = min(max(bisect_left(ROWS, n_rows), 1), len(ROWS) - 1)
    part = (n_rows - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])
    return (STEP_MS[i - 1] + part * (STEP_MS[i] - STEP_MS[i - 1])) / 1000


@contextmanager
def emulating(scale: float, *, as_it_comes: bool = False) -> Iterator[None]:
    """Workers started inside take `scale` times `step_s`. `as_it_comes`: they neither form cohorts nor send
    the rows of a batch together."""
    before = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        says = f"from bench.common.emulated_steps import install\n\ninstall({scale!r}, {as_it_comes!r})\n"
        (Path(folder) / "sitecustomize.py").write_text(says)
        paths = (folder, str(Path(__file__).parents[2]), before)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        try:
            yield
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


def install(scale: float, as_it_comes: bool) -> None:
    """In the process that is starting: change the modules of a worker when they are imported."""
    changes: Changes = {"swarmllm_workers.engine.segment": partial(_slow_down, scale)}
    if as_it_comes:
        changes["swarmllm_workers.schedule.scheduler"] = _take_as_it_comes
    sys.meta_path.insert(0, _Changing(changes))


class _Changing(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _slow_down(scale: float, module: ModuleType) -> None:
    segment = module.Segment
    run, step = segment.run, segment.step

    def wait(its: Any, n_rows: int, began_s: float) -> None:
        part = (its.end - its.start) / its._n_layers
        time.sleep(max(0.0, step_s(n_rows) * scale * part - (time.perf_counter() - began_s)))

    def slow_run(its: Any, spans: Sequence[Any]) -> Any:
        began_s = time.perf_counter()
        results = run(its, spans)
        wait(its, sum(len(span.data) for span in spans), began_s)
        return results

    def slow_step(its: Any, *arguments: Any) -> Any:
        began_s = time.perf_counter()
        row = step(its, *arguments)
        wait(its, 1, began_s)
        return row

    segment.run, segment.step = slow_run, slow_step


def _take_as_it_comes(module: ModuleType) -> None:
    scheduler = module.Scheduler
    begin = scheduler.__init__

    def without_cohorts(its: Any, *arguments: Any) -> None:
        begin(its, *arguments)
        its._cohorts = its._outlet = None

    scheduler.__init__ = without_cohorts
