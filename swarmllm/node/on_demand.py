"""Loads a model when a request asks for it, and unloads it when it has not been used for some time.

Only where nobody decided otherwise: all of the model is on this disk or on those of connected nodes, none of
its layers is loaded here, the connected nodes do not hold all of them, and no placement manages it. What a
person loads stays until a person unloads it. Requests of other nodes that run through its layers keep a model
as this node's own do, for the time that was set when it was loaded. Where memory is short, models go that
were loaded for requests and are idle, the one that was not used longest first. A model for which that is not
enough is spread over the nodes that accept what this one shares.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import trio

from swarmllm.errors import InvalidRequest, SwarmLLMError, WorkerError
from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.workerpool import LoadOptions
from swarmllm_proto.identifiers import ModelId

FOREVER_S = math.inf
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)", re.ASCII)
MAX_S = 10.0 * 365 * 86400
LOOK_AGAIN_S = 10.0
"""At a model that other nodes use."""


def parse_keep_alive(said: float | str | None) -> float | None:
    """As Ollama takes it: seconds, or Go's "5m", "1h30m"; negative: for ever. None: not said. Raises
    InvalidRequest naming `keep_alive`."""
    if said is None:
        return None
    if isinstance(said, str):
        text = said.strip()
        sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
        parts = list(_PART.finditer(digits))
        if "".join(part[0] for part in parts) == digits and parts:
            said = sign * sum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
        else:
            try:
                said = float(text)
            except ValueError:
                raise InvalidRequest(
                    f"keep_alive: {text[:40]!r} is neither seconds nor a duration like 5m.",
                    field="keep_alive",
                ) from None
    if math.isnan(said):
        raise InvalidRequest("keep_alive is no number.", field="keep_alive")
    return FOREVER_S if said < 0 or said > MAX_S else said


@dataclass(slots=True)
class _Kept:
    keep_s: float
    """After this node's own requests, as the latest of them says."""
    keep_for_others_s: float
    since_s: float
    """When its last request ended."""
    n_requests: int = 0
    """Under way."""


def _nobody(_model_id: ModelId) -> float:
    return -math.inf


class KeepAlive:
    def __init__(self, used_by_others_s: Callable[[ModelId], float] = _nobody) -> None:
        """`used_by_others_s`: when other nodes' requests used the model here last; infinity while one does,
        minus infinity where none has."""
        self._used_by_others_s = used_by_others_s
        self._kept: dict[ModelId, _Kept] = {}

    def __contains__(self, model_id: ModelId) -> bool:
        return model_id in self._kept

    def loaded(self, model_id: ModelId, keep_s: float, now_s: float) -> None:
        self._kept[model_id] = _Kept(keep_s, keep_s, now_s)

    def begin(self, model_id: ModelId, keep_s: float | None) -> None:
        """A request; `keep_s`: what it says, from now on."""
        if (kept := self._kept.get(model_id)) is not None:
            kept.n_requests += 1
            if keep_s is not None:
                kept.keep_s = keep_s

    def end(self, model_id: ModelId, now_s: float) -> None:
        if (kept := self._kept.get(model_id)) is not None and kept.n_requests:
            kept.n_requests -= 1
            kept.since_s = now_s

    def forget(self, model_id: ModelId) -> None:
        """It is gone, or stays because a person loaded it."""
        self._kept.pop(model_id, None)

    def is_expired(self, model_id: ModelId, now_s: float) -> bool:
        return model_id in self._kept and self._expires_s(model_id) <= now_s

    def is_idle(self, model_id: ModelId) -> bool:
        """Whether it was loaded for a request and none uses it."""
        return model_id in self._kept and self._is_idle(model_id)

    def _is_idle(self, model_id: ModelId) -> bool:
        return not self._kept[model_id].n_requests and self._used_by_others_s(model_id) < math.inf

    def _expires_s(self, model_id: ModelId) -> float:
        """Infinity: not as things are."""
        kept = self._kept[model_id]
        if kept.n_requests:
            return math.inf
        for_others_s = self._used_by_others_s(model_id) + kept.keep_for_others_s
        # Minus infinity and infinity: nobody else has used it.
        return max(kept.since_s + kept.keep_s, -math.inf if math.isnan(for_others_s) else for_others_s)

    def expired(self, now_s: float) -> tuple[ModelId, ...]:
        return tuple(model_id for model_id in self._kept if self.is_expired(model_id, now_s))

    def next_s(self, now_s: float) -> float:
        """When to look whether one has expired; infinity: when a request has ended."""
        times_s = [self._expires_s(model_id) for model_id in self._kept]
        if any(self._used_by_others_s(model_id) == math.inf for model_id in self._kept):
            times_s.append(now_s + LOOK_AGAIN_S)  # nobody tells when those have ended
        return min(times_s, default=math.inf)

    def idle_longest(self) -> ModelId | None:
        """The model that goes first where memory is needed."""
        idle = {
            model_id: max(kept.since_s, self._used_by_others_s(model_id))
            for model_id, kept in self._kept.items()
            if self._is_idle(model_id)
        }
        return min(idle, key=lambda model_id: idle[model_id], default=None)

    def expires_in_s(self, model_id: ModelId | Literal[""], now_s: float) -> float | None:
        """None: it was not loaded for a request, or stays for ever."""
        if not model_id or model_id not in self._kept:
            return None
        kept = self._kept[model_id]
        if kept.n_requests or not self._is_idle(model_id):
            left_s = kept.keep_s if kept.n_requests else kept.keep_for_others_s
        else:
            left_s = max(0.0, self._expires_s(model_id) - now_s)
        return None if math.isinf(left_s) else left_s


log = logging.getLogger("swarmllm.node")

OUT_OF_MEMORY = "out_of_memory"
"""The kind of a worker's refusal."""


class DemandedModels(Protocol):
    """The models of this node, as far as they are loaded on demand."""

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]: ...

    def can_bring(self, entry: CatalogueEntry) -> bool:
        """All of it is here, or other nodes have some of it to give."""
        ...

    def lacks_room(self, entry: CatalogueEntry) -> bool:
        """Its weights alone are more than the memory that is left."""
        ...

    async def fetch(self, entry: CatalogueEntry) -> None:
        """What is not on this disk, if the model has room here. Raises SwarmLLMError."""
        ...

    async def load_whole(self, entry: CatalogueEntry, options: LoadOptions) -> None:
        """Raises SwarmLLMError."""
        ...

    async def spread_out(self, entry: CatalogueEntry) -> bool:
        """Over the nodes that accept it; False: they have no room either. Raises SwarmLLMError."""
        ...

    def is_spread(self, model_id: ModelId) -> bool: ...

    async def drop_whole(self, entry: CatalogueEntry) -> None:
        """Here, or on the nodes over which it is spread. Raises SwarmLLMError."""
        ...

    def is_complete(self, entry: CatalogueEntry) -> bool:
        """A request for it would find a pipeline."""
        ...

    def is_managed(self, model_id: ModelId) -> bool:
        """Placement loads and drops it, and not because it is spread for a request."""
        ...

    def may_load(self) -> bool:
        """Whether anything is loaded on demand now."""
        ...

    def used_by_others_s(self, model_id: ModelId) -> float:
        """As for KeepAlive."""
        ...


class OnDemand:
    def __init__(self, models: DemandedModels) -> None:
        self._models = models
        self._kept = KeepAlive(models.used_by_others_s)
        self._entries: dict[ModelId, CatalogueEntry] = {}
        self._changing = trio.Lock()
        """One load or drop at a time: each is fitted into the memory that the others leave."""
        self._coming: ModelId | None = None
        """The model that is being loaded: requests for it wait."""
        self._going: set[str] = set()
        """Models that are being dropped: they look loaded until they are gone."""
        self._changed = trio.Event()

    @asynccontextmanager
    async def using(
        self, entry: CatalogueEntry, options: LoadOptions, keep_s: float, said_s: float | None = None
    ) -> AsyncIterator[None]:
        """For the time of a request. `keep_s`: how long the model stays afterwards if it has to be loaded;
        `said_s`: what the request says about that. Raises what loading raises."""
        model_id = entry.model_id
        if self.is_wanted(entry):
            # What takes long keeps no other model waiting.
            await self._models.fetch(entry)
        if self.is_wanted(entry) or model_id in self._going or model_id == self._coming:
            async with self._changing:
                if self.is_wanted(entry):
                    self._coming = model_id
                    try:
                        await self._bring(entry, options, keep_s)
                    finally:
                        self._coming = None
                self._kept.begin(model_id, said_s)
        else:
            self._kept.begin(model_id, said_s)
        try:
            yield
        finally:
            self._kept.end(model_id, trio.current_time())
            self._changed.set()

    def forget(self, model_id: ModelId) -> None:
        """A person has loaded or unloaded it."""
        self._kept.forget(model_id)
        self._entries.pop(model_id, None)

    async def give_up(self, model_id: ModelId) -> None:
        """Unload it now if it was loaded for requests and none uses it: its user removes it."""
        async with self._changing:
            if self._kept.is_idle(model_id) and not self._models.is_managed(model_id):
                await self._drop_now(model_id)

    def has_loaded(self, model_id: ModelId) -> bool:
        """Whether it is here because requests asked for it, under way or not."""
        return model_id in self._kept

    def expires_in_s(self, model_id: ModelId | Literal[""]) -> float | None:
        """None: it does not."""
        return self._kept.expires_in_s(model_id, trio.current_time())

    async def run(self) -> None:
        """Drop what was not asked for long enough, until cancelled."""
        while True:
            with trio.move_on_at(self._kept.next_s(trio.current_time())):
                await self._changed.wait()
            self._changed = trio.Event()
            for model_id in self._kept.expired(trio.current_time()):
                await self._let_go(model_id)

    def is_wanted(self, entry: CatalogueEntry) -> bool:
        """Whether a request for it would load it."""
        return (
            self._models.may_load()
            and not self._models.loaded(entry.model_id)
            and not self._models.is_managed(entry.model_id)
            and self._models.can_bring(entry)
            and not self._models.is_complete(entry)
        )

    async def _bring(self, entry: CatalogueEntry, options: LoadOptions, keep_s: float) -> None:
        log.info("loading %s, which a request asks for", entry.name)
        models = self._models
        while models.lacks_room(entry):
            if not await self._make_room(entry):
                if not await models.spread_out(entry) and entry.absent(entry.manifest.tensors):
                    return  # not worth fetching; who plans the request says what is missing
                break
        while not models.is_spread(entry.model_id):
            try:
                await models.load_whole(entry, options)
            except WorkerError as error:
                if error.kind != OUT_OF_MEMORY:
                    raise
                # What keys, values and work space take besides, the worker finds out.
                if not await self._make_room(entry) and not await models.spread_out(entry):
                    raise
            else:
                break
        self._entries[entry.model_id] = entry
        self._kept.loaded(entry.model_id, keep_s, trio.current_time())
        self._changed.set()

    async def _make_room(self, entry: CatalogueEntry) -> bool:
        """Drop the model that nobody has used longest; False: there is none."""
        idle = self._kept.idle_longest()
        if idle is None or idle == entry.model_id:
            return False
        log.info("unloading %s to make room for %s", self._entries[idle].name, entry.name)
        await self._drop_now(idle)
        return True

    async def _let_go(self, model_id: ModelId) -> None:
        async with self._changing:
            # Somebody may have asked for it while another one went.
            if self._models.is_managed(model_id):
                self.forget(model_id)
            elif self._kept.is_expired(model_id, trio.current_time()):
                log.info("unloading %s, which nobody has asked for", self._entries[model_id].name)
                await self._drop_now(model_id)

    async def _drop_now(self, model_id: ModelId) -> None:
        entry = self._entries[model_id]
        self.forget(model_id)
        self._going.add(model_id)
        try:
            await self._models.drop_whole(entry)
        except SwarmLLMError as error:
            log.info("%s is not unloaded: %s", entry.name, error.message)
        finally:
            self._going.discard(model_id)
