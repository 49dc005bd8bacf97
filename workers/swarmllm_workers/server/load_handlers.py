"""What brings layers in and out, or tries which ones may be: calls that take seconds and tell how far they
are."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from swarmllm_proto import ipc
from swarmllm_workers.engine.cut_check import check_cuts
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.kernel_tuning import KernelTuning
from swarmllm_workers.engine.segment_maker import LoadProgress
from swarmllm_workers.schedule.work import Send
from swarmllm_workers.speculation.speculation import Speculation

PROGRESS_INTERVAL_S: Final = 0.05
REASON_MAX: Final = 500
"""Characters of what libllama complained of."""


class LoadHandlers:
    def __init__(
        self,
        opened: Callable[[], Engine],
        speculation: Callable[[], Speculation | None],
        kernels: Callable[[], KernelTuning],
        send: Send,
        finish: Callable[[int], None],
    ) -> None:
        """`finish`: say goodbye to a call, and leave."""
        self._opened = opened
        self._speculation = speculation
        self._kernels = kernels
        self._send = send
        self._finish = finish
        self.by_type: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.Load: self._load,
            ipc.Unload: self._unload,
            ipc.CheckCuts: self._check_cuts,
        }

    def _load(self, message: ipc.Load, _payload: memoryview) -> None:
        engine, speculation = self._opened(), self._speculation()
        guesses = speculation if (message.start, message.end) == (0, engine.n_layers) else None
        if guesses is not None:
            guesses.load()
        engine.load(message.start, message.end, self._progress_of(message.id))
        paths = [segment.path for segment in engine.segments]
        if guesses is not None and guesses.settings.draft_path:
            paths.insert(0, Path(guesses.settings.draft_path))
        self._kernels().tune(paths, engine.settings.n_threads)
        if guesses is not None:
            guesses.loaded(self._progress_of(message.id))
        # What lives as long as the worker need not be looked through between two tokens.
        gc.collect()
        gc.freeze()
        self._answer_loaded(message.id)

    def _unload(self, message: ipc.Unload, _payload: memoryview) -> None:
        engine = self._opened()
        engine.unload(message.start, message.end, self._progress_of(message.id))
        self._answer_loaded(message.id)
        if not engine.ranges:
            self._finish(message.id)

    def _check_cuts(self, message: ipc.CheckCuts, _payload: memoryview) -> None:
        engine = self._opened()
        verdict = check_cuts(
            engine.whole_file(),
            engine.cache_dir,
            engine.settings,
            self._progress_of(message.id),
            message.units,
        )
        self._send(
            ipc.CutsChecked(
                id=message.id, cut_alignment=verdict.unit, whole_reason=verdict.reason[:REASON_MAX]
            )
        )

    def _progress_of(self, call_id: int) -> LoadProgress:
        told_at = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal told_at
            now = time.monotonic()
            if now - told_at >= PROGRESS_INTERVAL_S or done >= total:
                told_at = now
                self._send(ipc.Progress(id=call_id, done_bytes=done, total_bytes=total))

        return tell

    def _answer_loaded(self, call_id: int) -> None:
        engine, speculation = self._opened(), self._speculation()
        memory = engine.memory
        if speculation is not None:
            memory += speculation.memory
        self._send(
            ipc.Loaded(
                id=call_id,
                ranges=engine.ranges,
                weights_bytes=memory.weights_bytes,
                kv_bytes=memory.kv_bytes,
                work_bytes=memory.work_bytes,
                kernels=self._kernels().choices,
            )
        )
