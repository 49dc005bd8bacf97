"""Loading again, at the start of the daemon, what its user had loaded by hand.

One model after the other, because each is fitted into the memory that the ones before it have left. What does
not come back (its file is on a disk that is not there, it does not fit any more) costs the node nothing else:
it is said in the log and by `LoadRestorer.missing`, and stays remembered for the next start. What only needs
a file or a node that is not there yet is tried again, because disks are mounted and machines are switched on
in any order; what does not fit is not, because each try may cost somebody else the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from swarmllm.errors import BadModel, ModelNotFound, NodeUnreachable, StoreLocked, SwarmLLMError
from swarmllm.models import CatalogueEntry, LayerRange, subtract
from swarmllm.node.remembered_loads import RememberedLoad, RememberedLoads
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions, WorkerPool
from swarmllm_proto.identifiers import ModelId

log = logging.getLogger("swarmllm.node")

Find = Callable[[str], Awaitable[CatalogueEntry]]
Hold = Callable[[CatalogueEntry, LayerRange, LoadOptions], Awaitable[object]]
Act = Callable[[], Awaitable[None]]
Patiently = Callable[[Act], Awaitable[None]]

RETRY_S = 30.0


class LoadRestorer:
    def __init__(self, remembered: RememberedLoads, pool: WorkerPool, *, find: Find, hold: Hold) -> None:
        self._remembered = remembered
        self._pool = pool
        self._find = find
        self._hold = hold
        self._failures: dict[str, str] = {}
        """By model id."""
        self._may_pass: set[str] = set()
        """Those of them that may be over without anybody's doing here."""
        self._tried = trio.Event()

    async def run(self, patiently: Patiently) -> None:
        """`patiently` does something again while nobody is connected yet who might help."""
        late = []
        for load in self._remembered.all():
            try:
                await self._bring_back(load.model_id)
            except (ModelNotFound, NodeUnreachable):
                # Those that need nobody's help do not wait for it.
                late.append(load)
        for load in late:
            await self._settle(load, partial(patiently, partial(self._bring_back, load.model_id)))
        self._tried.set()

    async def keep_trying(self) -> None:
        """After `run`: what a file or a node was missing for, every now and then until nothing is left."""
        await self._tried.wait()
        while waiting := [load for load in self._remembered.all() if load.model_id in self._may_pass]:
            await trio.sleep(RETRY_S)
            for load in waiting:
                self._may_pass.discard(load.model_id)
                await self._settle(load, partial(self._bring_back, load.model_id))

    def missing(self) -> str:
        """What did not come back and still is not here, and why; empty if there is no such thing."""
        return "; ".join(
            f"{load.name} {', '.join(map(str, layers))}, which was loaded before, is not:"
            f" {self._failures[load.model_id]} (to do without: swarmllm models unload {load.name})"
            for load in self._remembered.all()
            if load.model_id in self._failures and (layers := self._absent(load))
        )

    async def _settle(self, load: RememberedLoad, bring_back: Act) -> None:
        try:
            await bring_back()
        except ModelNotFound:
            log.warning("%s was loaded before, and is forgotten: nobody knows this model any more", load)
            for layers in load.layers:
                await self._remembered.forget(load.model_id, load.name, layers)
        except NodeUnreachable as error:
            self._has_failed(load, error)

    async def _bring_back(self, model_id: ModelId) -> None:
        """Raises ModelNotFound, NodeUnreachable; all else is said, and does not stop anything."""
        finished = False
        while not finished and (load := self._remembered.get(model_id)) is not None:
            with self._remembered.until_forgotten(model_id):
                try:
                    await self._load(load)
                except (ModelNotFound, NodeUnreachable):
                    raise
                except SwarmLLMError as error:
                    self._has_failed(load, error)
                except Exception as error:
                    # Whatever it is, a daemon that ended by it would end at each start again.
                    log.exception("%s could not be loaded again", load)
                    self._failures[model_id] = str(error) or type(error).__name__
                finished = True

    async def _load(self, load: RememberedLoad) -> None:
        # What the configuration has loaded already, it has loaded with options of its own.
        options = AS_CONFIGURED if self._pool.loaded(load.model_id) else load.options
        entry = await self._find(load.model_id)
        for layers in self._absent(load):
            log.info("loading %s %s again, which was loaded before the daemon ended", load.name, layers)
            await self._hold(entry, layers, options)

    def _absent(self, load: RememberedLoad) -> tuple[LayerRange, ...]:
        return subtract(load.layers, self._pool.loaded(load.model_id))

    def _has_failed(self, load: RememberedLoad, error: SwarmLLMError) -> None:
        if self._failures.get(load.model_id) != error.message:
            log.error("loading %s again failed: %s", load, error.message)
        self._failures[load.model_id] = error.message
        if isinstance(error, BadModel | NodeUnreachable | StoreLocked):
            self._may_pass.add(load.model_id)
