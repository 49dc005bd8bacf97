"""Remembers over restarts which models the user of this node loaded by hand: `loaded.json` in the data
folder.

A node that comes back after a power cut should serve what it served before, without anybody having to notice.
Models of `model.load` are not remembered unless they were loaded by hand too, and those that `auto_manage`
placed never are: both are decided anew at each start. Layers count once they are loaded, not when they are
asked for, so that a load which takes the machine down is not the first thing it does when it is up again.

A small file of its own and not a table of the catalogue: it is worth little beside what a damaged database
costs, so one that cannot be read is ignored, and anyone who wants to start without it may remove it.

Models are loaded one after the other, because each is fitted into the memory that the earlier ones have left.
A model that cannot be loaded (its disk is missing, or it does not fit any more) stops nothing else: the log
and `LoadRestorer.missing` report it, and it stays remembered for the next start. What only needs a file or a
node that is not there yet is tried again, because disks are mounted and machines are switched on in any
order; what does not fit is not, because each try may cost somebody else the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarmllm.errors import (
    BadModel,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    StoreLocked,
    SwarmLLMError,
)
from swarmllm.models import LayerRange, merge, subtract
from swarmllm.node.model_access import LoadsModels
from swarmllm.private_files import write_private
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions, WorkerPool
from swarmllm_proto.identifiers import ModelId

log = logging.getLogger("swarmllm.node")

FILE_NAME = "loaded.json"
VERSION = 1
MAX_FILE_BYTES = 2**20
"""Room for some thousand models."""


@dataclass(frozen=True, slots=True)
class RememberedLoad:
    model_id: ModelId
    name: str
    """As it was called when it was loaded."""
    layers: tuple[LayerRange, ...]
    """At least one; in order, apart from each other."""
    options: LoadOptions = AS_CONFIGURED
    """As they were given: what they do not say follows the configuration."""

    def __str__(self) -> str:
        return f"{self.name} {', '.join(map(str, self.layers))}"


class RememberedLoads:
    def __init__(self, path: Path | None = None, loads: Iterable[RememberedLoad] = ()) -> None:
        """`path` None: nothing outlives the process. `loads` is what an earlier one left."""
        self._path = path
        self._loads = {load.model_id: load for load in loads}
        self._saving = trio.Lock()
        self._coming_back: dict[str, trio.CancelScope] = {}

    def __repr__(self) -> str:
        return f"<RememberedLoads {'; '.join(map(str, self.all()))}>"

    def all(self) -> tuple[RememberedLoad, ...]:
        return tuple(self._loads.values())

    def get(self, model_id: ModelId) -> RememberedLoad | None:
        return self._loads.get(model_id)

    async def remember(
        self, model_id: ModelId, name: str, layers: LayerRange, options: LoadOptions, *, beside_others: bool
    ) -> None:
        """Layers were loaded; `beside_others`: beside layers of the model whose options go on counting. Where
        it cannot be written the log says so."""
        for other in self.all():
            # A name is one model's; what had it before is not known by it any more.
            if other.name == name and other.model_id != model_id:
                del self._loads[other.model_id]
        known = self._loads.get(model_id)
        if known is not None:
            layers_held = merge([*known.layers, layers])
            options = _laid_over(known.options, options) if beside_others else options
        else:
            layers_held = (layers,)
        self._loads[model_id] = RememberedLoad(model_id, name, layers_held, options)
        await self._save()

    async def forget(self, model_id: ModelId, name: str, gone: LayerRange) -> bool:
        """Layers are not wanted any more, of this model or of one that had its name before; whether any of
        them were remembered. What is bringing them back is cancelled."""
        changed = [
            (load, subtract(load.layers, [gone]))
            for load in self.all()
            if load.model_id == model_id or load.name == name
        ]
        changed = [(load, left) for load, left in changed if left != load.layers]
        for load, left in changed:
            if left:
                self._loads[load.model_id] = replace(load, layers=left)
            else:
                del self._loads[load.model_id]
            if scope := self._coming_back.get(load.model_id):
                scope.cancel()
        if changed:
            await self._save()
        return bool(changed)

    @contextmanager
    def until_forgotten(self, model_id: ModelId) -> Iterator[None]:
        """The block is left at once where layers of the model are forgotten."""
        with trio.CancelScope() as scope:
            self._coming_back[model_id] = scope
            try:
                yield
            finally:
                del self._coming_back[model_id]

    async def _save(self) -> None:
        if self._path is None:
            return
        with trio.CancelScope(shield=True):
            async with self._saving:
                try:
                    await trio.to_thread.run_sync(write_private, self._path, _encoded(self.all()))
                except ConfigError as error:
                    log.warning("the next start will not know what is loaded now: %s", error.message)


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    model_id: ModelId
    name: Annotated[str, Meta(min_length=1, max_length=200)]
    layers: Annotated[tuple[Annotated[str, Meta(max_length=32)], ...], Meta(min_length=1, max_length=1024)]
    options: LoadOptions = AS_CONFIGURED


class _Version(msgspec.Struct, frozen=True):
    version: int


class _File(_Version, frozen=True, kw_only=True):
    models: tuple[_Model, ...]


def open_remembered_loads(data_dir: Path) -> RememberedLoads:
    """As an earlier run left them; none where the file cannot be used, which the log says. Blocking."""
    path = data_dir / FILE_NAME
    try:
        loads = _read(path)
    except (OSError, ValueError, InvalidRequest) as error:
        log.warning(
            "%s is ignored, so what was loaded by hand before is not loaded again; the next load or unload"
            " writes it anew: %s",
            path,
            error.message if isinstance(error, InvalidRequest) else error,
        )
        loads = ()
    return RememberedLoads(path, loads)


def _read(path: Path) -> tuple[RememberedLoad, ...]:
    """Raises OSError, ValueError, InvalidRequest."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return ()
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    version = msgspec.json.decode(content, type=_Version).version
    if version != VERSION:
        raise ValueError(
            f"it was written by another version of swarmllm ({version}, this one reads {VERSION})"
        )
    return tuple(
        RememberedLoad(model.model_id, model.name, merge(map(LayerRange.parse, model.layers)), model.options)
        for model in msgspec.json.decode(content, type=_File).models
    )


def _encoded(loads: Iterable[RememberedLoad]) -> bytes:
    models = [
        {
            "model_id": load.model_id,
            "name": load.name,
            "layers": list(map(str, load.layers)),
            "options": {key: value for key, value in asdict(load.options).items() if value is not None},
        }
        for load in loads
    ]
    return msgspec.json.format(msgspec.json.encode({"version": VERSION, "models": models})) + b"\n"


def _laid_over(below: LoadOptions, above: LoadOptions) -> LoadOptions:
    said = {each.name: getattr(above, each.name) for each in fields(above)}
    return replace(below, **{name: value for name, value in said.items() if value is not None})


Act = Callable[[], Awaitable[None]]
Retry = Callable[[Act], Awaitable[None]]

RETRY_S = 30.0


class LoadRestorer:
    def __init__(self, remembered: RememberedLoads, pool: WorkerPool, models: LoadsModels) -> None:
        self._remembered = remembered
        self._pool = pool
        self._models = models
        self._failures: dict[str, str] = {}
        """By model id."""
        self._may_pass: set[str] = set()
        """Those of them that may be over without anybody's doing here."""
        self._tried = trio.Event()

    async def run(self, retry: Retry) -> None:
        """`retry` does something again while nobody is connected yet who might help."""
        late = []
        for load in self._remembered.all():
            try:
                await self._bring_back(load.model_id)
            except (ModelNotFound, NodeUnreachable):
                # Those that need nobody's help do not wait for it.
                late.append(load)
        for load in late:
            await self._settle(load, partial(retry, partial(self._bring_back, load.model_id)))
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
        """Loads the layers again. Raises ModelNotFound and NodeUnreachable; logs all other errors."""
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
        entry = await self._models.find(load.model_id)
        for layers in self._absent(load):
            log.info("loading %s %s again, which was loaded before the daemon ended", load.name, layers)
            await self._models.hold(entry, layers, options=options)

    def _absent(self, load: RememberedLoad) -> tuple[LayerRange, ...]:
        return subtract(load.layers, self._pool.loaded(load.model_id))

    def _has_failed(self, load: RememberedLoad, error: SwarmLLMError) -> None:
        if self._failures.get(load.model_id) != error.message:
            log.error("loading %s again failed: %s", load, error.message)
        self._failures[load.model_id] = error.message
        if isinstance(error, BadModel | NodeUnreachable | StoreLocked):
            self._may_pass.add(load.model_id)
