"""Worker processes that encode, one for each open model or projector: started when first needed, ended when
idle. Each encodes one item after the other."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar

import trio

from swarmllm.errors import Overloaded
from swarmllm.supervision import spawn
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import OpenProjector, OpenTextEncoder, WorkerMessage

log = logging.getLogger("swarmllm.workerpool")

TURN_TIMEOUT_S: Final = 300.0
"""For a turn behind others."""

Key = TypeVar("Key", bound=Hashable)
Opened = TypeVar("Opened", bound=WorkerMessage)


@dataclass(slots=True)
class EncoderWorker(Generic[Opened]):
    """The worker process, if there is one, and its open model or projector."""

    turn: trio.Lock = field(default_factory=trio.Lock)
    worker: Worker | None = None
    opened_as: object = None
    opened: Opened | None = None
    n_waiting: int = 0

    def serves(self, opened_as: object) -> bool:
        return self.worker is not None and self.worker.alive and self.opened_as == opened_as


class EncoderWorkers(Generic[Key, Opened]):
    def __init__(self, hosts: HostedModels, what: Literal["pictures", "texts"], answer: type[Opened]) -> None:
        """`what`: an option of the worker's command line; `answer`: to the message that opens."""
        self._hosts = hosts
        self._what = what
        self._answer = answer
        self._by_key: dict[Key, EncoderWorker[Opened]] = {}
        self.kept_open: set[Key] = set()
        """Whose workers are not ended where they are idle."""
        hosts.when_idle.append(self._stop_idle)

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[EncoderWorker[Opened]]:
        """Raises Overloaded where that takes too long."""
        encoder = self._by_key.setdefault(key, EncoderWorker())
        encoder.n_waiting += 1
        try:
            try:
                with trio.fail_after(TURN_TIMEOUT_S):
                    await encoder.turn.acquire()
            except trio.TooSlowError:
                raise Overloaded(f"too many {self._what} wait for this model's encoder") from None
            try:
                yield encoder
            finally:
                encoder.turn.release()
        finally:
            encoder.n_waiting -= 1

    async def open(
        self,
        encoder: EncoderWorker[Opened],
        model_id: ModelId,
        opened_as: object,
        message: Callable[[int], OpenProjector | OpenTextEncoder],
        check: Callable[[Opened], None] = lambda _: None,
    ) -> tuple[Worker, Opened]:
        """In its turn: the worker that has `opened_as` open, and what it said of it. `message(id)` opens it;
        what `check` raises of the answer is raised. Raises BadModel, WorkerDied, WorkerError."""
        if encoder.serves(opened_as) and encoder.worker is not None and encoder.opened is not None:
            return encoder.worker, encoder.opened
        if encoder.worker is not None:
            await encoder.worker.stop("was stopped because something else is to be opened")
            encoder.worker = None
        worker = await self._spawned()
        try:
            await worker.ready()
            opened, _ = await worker.call(
                message(worker.new_id()), self._answer, timeout_s=self._hosts.settings.load_timeout_s
            )
            check(opened)
        except BaseException:
            worker.kill("could not open what it is to encode with")
            raise
        log.info("worker %d encodes %s for model %s", worker.pid, self._what, model_id)
        encoder.worker, encoder.opened_as, encoder.opened = worker, opened_as, opened
        return worker, opened

    async def bare(self, encoder: EncoderWorker[Opened]) -> Worker:
        """In its turn: a worker that has nothing open. Raises WorkerDied."""
        if encoder.worker is None or not encoder.worker.alive:
            worker = await self._spawned()
            try:
                await worker.ready()
            except BaseException:
                worker.kill("did not start")
                raise
            encoder.worker = worker
        return encoder.worker

    async def _spawned(self) -> Worker:
        settings = self._hosts.settings
        worker = await Worker.spawn(
            (*self._hosts.command, f"--{self._what}", "--log-level", settings.log_level),
            self._hosts.socket_dir,
            start_timeout_s=settings.start_timeout_s,
            stop_timeout_s=settings.stop_timeout_s,
        )
        spawn(self._hosts.nursery(), "worker", worker.run)
        return worker

    def is_open(self, key: Key) -> bool:
        """Whether a worker has it open."""
        encoder = self._by_key.get(key)
        return encoder is not None and encoder.worker is not None and encoder.worker.alive

    async def end(self, is_meant: Callable[[Key], bool], why: str) -> None:
        """The workers of these."""
        self.kept_open = {key for key in self.kept_open if not is_meant(key)}
        for key in [key for key in self._by_key if is_meant(key)]:
            encoder = self._by_key.pop(key)
            if encoder.worker is not None:
                await encoder.worker.stop(why)

    async def _stop_idle(self) -> None:
        for key, encoder in tuple(self._by_key.items()):
            worker = encoder.worker
            if encoder.n_waiting or (key in self.kept_open and worker is not None and worker.alive):
                continue
            if worker is None or not worker.alive:
                del self._by_key[key]
            elif trio.current_time() - worker.last_used_at >= self._hosts.settings.idle_timeout_s:
                del self._by_key[key]
                await worker.stop("was stopped because it was idle")
