"""Tries in a worker of its own where a model may be cut.

The worker ends afterwards: the worker that serves the model is not disturbed, and if a part of the model
crashes libllama, that is the answer.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from functools import cache

import trio

from swarmllm.errors import BadModel, SwarmLLMError, WorkerDied
from swarmllm.workerpool.calls import OnProgress
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.settings import ModelFile
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.architectures import units_to_try
from swarmllm_proto.ipc import CheckCuts, CutsChecked, Open, Opened


@dataclass(frozen=True, slots=True)
class CutVerdict:
    cut_alignment: int
    """Layers may be cut at multiples of this; 0: the model runs whole only. Where the check ended its worker,
    what the table says, 0: nothing."""
    whole_reason: str = ""
    n_layers: int = 0
    """Of the model, where the check ended its worker."""
    ended_worker: bool = False
    cannot_run: bool = False
    """libllama does not run it, cut or not."""


@cache
def engine_version() -> str:
    """What a verdict holds for: another libllama may build other graphs."""
    release, _, _ = importlib.metadata.version("llama_cpp_python").partition("+")
    return f"llama-cpp-python {release}"


class CutTrials:
    def __init__(self, hosts: HostedModels) -> None:
        self._hosts = hosts
        self.tries_listed = hosts.settings.check_cuts
        """Whether cuts are tried that the table of architectures allows."""

    async def check(self, model: ModelFile, progress: OnProgress | None = None) -> CutVerdict:
        """Try it; the whole file must be there. `progress`: (bytes run through, bytes at most), called on
        the trio thread. Raises WorkerError where it cannot be found out now (memory), DeadlineExceeded."""
        verdict = await self._check(model, progress)
        if not verdict.ended_worker:
            return verdict
        # Which size of parts it died of is not known: each gets a worker of its own, the finest first.
        for unit in units_to_try(verdict.n_layers, verdict.cut_alignment):
            coarser = await self._check(model, progress, (unit,))
            if coarser.cut_alignment and not coarser.ended_worker:
                return coarser
        return replace(verdict, cut_alignment=0)

    async def _check(
        self, model: ModelFile, progress: OnProgress | None, units: tuple[int, ...] = ()
    ) -> CutVerdict:
        outcome: list[CutVerdict | SwarmLLMError] = []
        trial = _Trial(self._hosts, model, units, progress)
        async with trio.open_nursery() as nursery:
            try:
                outcome.append(await trial.run(nursery))
            except BadModel as error:
                reason = f"libllama cannot run it: {error.message}"
                outcome.append(CutVerdict(0, reason, cannot_run=True))
            except WorkerDied as error:
                reason = f"a self-check ended its worker: {error.message}"
                is_open = trial.n_layers > 0
                outcome.append(
                    CutVerdict(
                        trial.cut_alignment,
                        reason,
                        trial.n_layers,
                        ended_worker=is_open,
                        cannot_run=not is_open,
                    )
                )
            except SwarmLLMError as error:
                outcome.append(error)
            nursery.cancel_scope.cancel()
        (found,) = outcome
        if isinstance(found, SwarmLLMError):
            raise found
        return found


class _Trial:
    """One worker that tries one model."""

    def __init__(
        self, hosts: HostedModels, model: ModelFile, units: tuple[int, ...], progress: OnProgress | None
    ) -> None:
        self.n_layers = 0
        self.cut_alignment = 0
        """By the table; both known once the model is open."""
        self._hosts = hosts
        self._model = model
        self._units = units
        self._progress = progress

    async def run(self, nursery: trio.Nursery) -> CutVerdict:
        settings = self._hosts.settings
        worker = await Worker.spawn(
            self._hosts.command,
            self._hosts.socket_dir,
            start_timeout_s=settings.start_timeout_s,
            stop_timeout_s=settings.stop_timeout_s,
        )
        nursery.start_soon(worker.run)
        await worker.ready()
        message = Open(
            id=worker.new_id(),
            path=str(self._model.path),
            model_id=self._model.model_id,
            cache_dir=str(settings.cache_dir),
            n_threads=settings.n_threads,
            use_mmap=settings.use_mmap,
        )
        opened, _ = await worker.call(message, Opened, timeout_s=settings.load_timeout_s)
        self.n_layers, self.cut_alignment = opened.n_layers, opened.cut_alignment
        found, _ = await worker.call(
            CheckCuts(id=worker.new_id(), units=self._units),
            CutsChecked,
            timeout_s=settings.load_timeout_s,
            on_progress=self._progress,
        )
        return CutVerdict(found.cut_alignment, found.whole_reason)
