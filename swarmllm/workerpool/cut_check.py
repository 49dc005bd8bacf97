"""The part of the pool that has a model of an unknown architecture tried: may it be cut, and where?

In a worker of its own, which leaves afterwards: the one that serves the model goes on undisturbed, and where
libllama dies of a part of the model, that is the answer.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import trio

from swarmllm.errors import BadModel, SwarmLLMError, WorkerDied
from swarmllm.workerpool.calls import OnProgress
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.ipc import CheckCuts, CutsChecked, Open, Opened


@dataclass(frozen=True, slots=True)
class CutVerdict:
    cut_alignment: int
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: str = ""


@cache
def engine_version() -> str:
    """What a verdict holds for: another libllama may build other graphs."""
    return f"llama-cpp-python {importlib.metadata.version('llama_cpp_python')}"


class CutCheckCalls(ABC):
    _settings: WorkerSettings
    _command: Sequence[str]
    _socket_dir: Path

    async def check_cuts(self, model: ModelFile, progress: OnProgress | None = None) -> CutVerdict:
        """Try it; the whole file must be there. `progress`: (bytes run through, bytes at most), called on
        the trio thread. Raises WorkerError where it cannot be found out now (memory), DeadlineExceeded."""
        outcome: list[CutVerdict | SwarmLLMError] = []
        async with trio.open_nursery() as nursery:
            try:
                outcome.append(await self._try_cuts(model, progress, nursery))
            except BadModel as error:
                outcome.append(CutVerdict(0, f"libllama cannot run it: {error.message}"))
            except WorkerDied as error:
                outcome.append(CutVerdict(0, f"a self-check ended its worker: {error.message}"))
            except SwarmLLMError as error:
                outcome.append(error)
            nursery.cancel_scope.cancel()
        (found,) = outcome
        if isinstance(found, SwarmLLMError):
            raise found
        return found

    async def _try_cuts(
        self, model: ModelFile, progress: OnProgress | None, nursery: trio.Nursery
    ) -> CutVerdict:
        settings = self._settings
        worker = await Worker.spawn(
            self._command,
            self._socket_dir,
            start_timeout_s=settings.start_timeout_s,
            stop_timeout_s=settings.stop_timeout_s,
        )
        nursery.start_soon(worker.run)
        await worker.ready()
        message = Open(
            id=worker.new_id(),
            path=str(model.path),
            model_id=model.model_id,
            cache_dir=str(settings.cache_dir),
            n_threads=settings.n_threads,
            use_mmap=settings.use_mmap,
        )
        await worker.call(message, Opened, timeout_s=settings.load_timeout_s)
        found, _ = await worker.call(
            CheckCuts(id=worker.new_id()),
            CutsChecked,
            timeout_s=settings.load_timeout_s,
            on_progress=progress,
        )
        return CutVerdict(found.cut_alignment, found.whole_reason)
