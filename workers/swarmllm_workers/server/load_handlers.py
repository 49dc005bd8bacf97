"""Handles calls that take seconds and report progress: open a model, load and unload layers, check cuts.

They run beside the decode steps, one after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import UNSET

from swarmllm_proto import ipc
from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.decode.bounded_call import mapping
from swarmllm_workers.engine.cut_check import CutVerdict, check_cuts
from swarmllm_workers.engine.engine_settings import SEQUENCES_MAX, EngineSettings
from swarmllm_workers.engine.gpus import free_bytes, gpus
from swarmllm_workers.engine.kernel_class import kernel_class
from swarmllm_workers.engine.libllama import Threads
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.engine.segment_maker import LoadProgress
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.read_ahead import ReadAhead
from swarmllm_workers.server.worker_state import WorkerState
from swarmllm_workers.speculation.speculation import SpeculationSettings


def engine_settings(
    message: ipc.Open, read_ahead: ReadAhead | None = None, threads: Threads | None = None
) -> EngineSettings:
    """The engine settings of a message. Raises CallError bad_message."""
    if message.kv_type != "f16" and message.flash_attention == "off":
        raise CallError("bad_message", f"stored as {message.kv_type}, values need flash attention", "kv_type")
    return EngineSettings(
        n_ctx=message.n_ctx,
        n_slots=message.n_slots,
        n_threads=message.n_threads,
        threads=threads,
        use_mmap=message.use_mmap,
        use_mlock=message.use_mlock,
        max_bytes=message.max_bytes,
        kv_type=message.kv_type,
        flash_attention=message.flash_attention,
        n_gpu_layers=0 if message.n_gpu_layers == "auto" and not free_bytes(gpus()) else message.n_gpu_layers,
        model_id=message.model_id,
        prefix_key=message.prefix_key,
        prefixes=_prefix_settings(message),
        journal_max_bytes=message.journal_max_bytes,
        checked_unit=message.checked_unit,
        is_unwanted=read_ahead.is_unwanted if read_ahead is not None else None,
    )


def speculation_settings(message: ipc.Open) -> SpeculationSettings:
    return SpeculationSettings(
        ngram_size_max=message.ngram_max_size,
        ngram_tokens_max=message.ngram_num_pred_tokens,
        draft_path=message.draft_path,
        draft_tokens_max=message.speculative_gamma,
        swift_tokens_max=message.swift_gamma if message.swift_skip_ratio else 0,
        swift_skip_ratio=message.swift_skip_ratio,
    )


def _prefix_settings(message: ipc.Open) -> PrefixSettings:
    # Three of the sequences beside the slots are none of the entries'.
    n_sequences = max(0, min(message.n_prefixes, SEQUENCES_MAX - message.n_slots - 3))
    return PrefixSettings(
        n_cells_entries=n_sequences,
        n_entries=message.n_prefixes if n_sequences else 0,
        max_bytes=message.prefix_max_bytes,
        min_tokens=message.prefix_min_tokens,
        ttl_s=message.prefix_ttl_s,
        session_ttl_s=message.session_ttl_s,
    )


def _n_gpu_layers(segments: Sequence[Segment]) -> int:
    return sum(min(each.n_gpu_layers, each.end - each.start + 1) for each in segments)


PROGRESS_INTERVAL_S: Final = 0.05
REASON_MAX: Final = 500
"""Characters of what libllama complained of."""


class LoadHandlers:
    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._unmeasured: list[Path] = []
        """Files whose products are to be timed when nobody decodes."""
        self._has_loaded = False
        self.by_type: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.Load: self._load,
            ipc.Unload: self._unload,
            ipc.CheckCuts: self._check_cuts,
            ipc.Cut: self._cut,
        }

    def tidy(self) -> None:
        """Do the work that was left for a moment in which nobody decodes."""
        if self._unmeasured and not self._state.loading.n_waiting:
            paths, self._unmeasured = self._unmeasured, []
            self._state.loading.begin(self._tuning(paths), partial(self._state.fail, 0))
        if self._has_loaded:
            self._has_loaded = False
            # What lives as long as the worker need not be looked through between two tokens.
            gc.collect()
            gc.freeze()

    def _load(self, message: ipc.Load, _payload: memoryview) -> None:
        self._state.engine().footprint.mapped_beside_bytes = message.mapped_beside_bytes or 0
        self._state.loading.begin(self._loading(message), partial(self._state.fail, message.id))

    def _loading(self, message: ipc.Load) -> Operation[None]:
        engine, speculation = self._state.engine(), self._state.speculation
        guesses = speculation if message.end == engine.n_layers else None
        if guesses is not None:
            yield from guesses.loading()
        yield from engine.layers.loading(message.start, message.end, self._progress_of(message.id))
        paths = list(dict.fromkeys(segment.path for segment in engine.layers.segments))
        if guesses is not None and guesses.settings.draft_path:
            paths.insert(0, Path(guesses.settings.draft_path))
        yield from self._tuning(paths)
        if guesses is not None and message.start == 0:
            yield from guesses.trying(self._progress_of(message.id))
        self._has_loaded = True
        self._answer_loaded(message.id)
        yield from engine.layers.filling()

    def _tuning(self, paths: list[Path]) -> Operation[None]:
        """Measuring has the processor's caches and all products to itself: not beside decode steps."""
        kernels = self._state.kernels
        if not kernels.is_on:
            return
        engine = self._state.engine()
        sources = yield partial(kernels.read, paths)
        for source in sources:
            if source.path in engine.source.paths:
                tensors = source.tensors.items()
                source.tensors = {name: each for name, each in tensors if engine.layers.uses(name)}
        is_known = kernels.tune(sources, engine.settings.n_threads, measures=not self._state.has_work)
        engine.large_batch_from = kernels.large_batch_from
        for source in sources:
            source.close()
        if not is_known:
            self._unmeasured = paths

    def _unload(self, message: ipc.Unload, _payload: memoryview) -> None:
        self._state.engine()
        self._state.loading.begin(self._unloading(message), partial(self._state.fail, message.id))

    def _unloading(self, message: ipc.Unload) -> Operation[None]:
        engine = self._state.engine()
        yield from engine.layers.unloading(message.start, message.end, self._progress_of(message.id))
        self._answer_loaded(message.id)
        yield from engine.layers.filling()
        if not engine.layers.ranges:
            self._state.finish(message.id)

    def _check_cuts(self, message: ipc.CheckCuts, _payload: memoryview) -> None:
        self._state.engine()
        self._state.loading.begin(self._checking_cuts(message), partial(self._state.fail, message.id))

    def _checking_cuts(self, message: ipc.CheckCuts) -> Operation[None]:
        engine, progress = self._state.engine(), self._progress_of(message.id)

        def check() -> CutVerdict:
            whole = engine.layers.whole_file()
            with mapping(3 * whole.stat().st_size + 2**30):
                return check_cuts(whole, engine.cache_dir, engine.settings, progress, message.units)

        verdict = yield check
        self._state.send(
            ipc.CutsChecked(
                id=message.id, cut_alignment=verdict.unit, whole_reason=verdict.reason[:REASON_MAX]
            )
        )

    def _cut(self, message: ipc.Cut, _payload: memoryview) -> None:
        self._state.engine()
        self._state.loading.begin(self._cutting(message), partial(self._state.fail, message.id))

    def _cutting(self, message: ipc.Cut) -> Operation[None]:
        layers = self._state.engine().layers
        yield from layers.cutting(message.start, message.end, if_idle=message.if_idle)
        self._state.send(ipc.Done(id=message.id))
        yield from layers.filling()

    def _progress_of(self, call_id: int) -> LoadProgress:
        """Called wherever a part runs."""
        reported_at = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal reported_at
            now = time.monotonic()
            if now - reported_at >= PROGRESS_INTERVAL_S or done >= total:
                reported_at = now
                self._state.loading.tell(
                    partial(self._state.send, ipc.Progress(id=call_id, done_bytes=done, total_bytes=total))
                )

        return tell

    def _answer_loaded(self, call_id: int) -> None:
        engine, speculation = self._state.engine(), self._state.speculation
        memory = engine.memory
        if speculation is not None:
            memory += speculation.memory
        # Drivers take memory as soon as they are asked.
        seen = tuple(ipc.Gpu(**asdict(gpu)) for gpu in gpus()) if engine.settings.n_gpu_layers else ()
        self._state.send(
            ipc.Loaded(
                id=call_id,
                ranges=engine.layers.ranges,
                weights_bytes=memory.weights_bytes,
                kv_bytes=memory.kv_bytes,
                work_bytes=memory.work_bytes,
                mapped_bytes=memory.mapped_bytes or UNSET,
                kernels=self._state.kernels.choices + self._state.kernels.attention_choices,
                kernel_class=kernel_class(engine.source, engine.settings) or UNSET,
                gpus=seen or UNSET,
                n_gpu_layers=(seen and _n_gpu_layers(engine.layers.segments)) or UNSET,
            )
        )
