"""The daemon's side of all its workers: one per model, started when it is needed, replaced when it dies.

A method that names a model by `ModelFile` may start its worker; one that takes a model id only talks to a
worker that is there. Workers are never restarted on their own: a model nobody asks for need not be in
memory, and a model that kills its worker does so once per request instead of in a loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio
from msgspec import UNSET

from swarmllm.errors import SwarmLLMError, WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.calls import TokenStream
from swarmllm.workerpool.cut_check import CutTrials
from swarmllm.workerpool.encoders import PictureEncoders
from swarmllm.workerpool.forward_result import ForwardResult, Hidden, Want, checked_tensor, forward_result
from swarmllm.workerpool.hosted import HostedModel
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.kept_kv import HeldRequests, KeptPrefixes
from swarmllm.workerpool.layers import HeldLayers
from swarmllm.workerpool.ring import NO_RING, RingCalls, RingHint
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm.workerpool.text_encoders import TextEncoders
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.codec import decode_pieces
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Payload
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import (
    AnyDaemonMessage,
    AnyWorkerMessage,
    ApplyTemplate,
    CancelRequest,
    CheckGrammar,
    Detokenize,
    Done,
    Effort,
    Embed,
    Forward,
    Generate,
    InfillTokens,
    KernelChoice,
    KvType,
    LayerResult,
    Opened,
    PrefixManifestUpdate,
    ReleaseRequestKv,
    Sampling,
    Text,
    TextPlace,
    Token,
    Tokenize,
    Tokens,
)
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.tensors import encode_tensor

log = logging.getLogger("swarmllm.workerpool")

# -P: the folder the daemon was started in must not provide modules to its workers.
WORKER_COMMAND = (sys.executable, "-P", "-m", "swarmllm_workers")
TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One model's worker at one moment."""

    model_id: ModelId
    pid: int | None
    """None where no worker is up."""
    loaded: tuple[LayerRange, ...]
    weights_bytes: int
    n_pending: int
    n_calls: int
    """Of the present process, like the byte counts."""
    bytes_sent: int
    bytes_received: int
    n_starts: int
    last_end: str
    """How the previous process ended."""
    n_failures: int = 0
    """Of its ends, those that the daemon did not ask for."""
    last_failure: str = ""
    """How the last of these came."""
    kernels: tuple[KernelChoice, ...] = ()
    """What it measured of its matrix products."""
    kernel_class: str = ""
    """See `ShardAnnounce`; "": nobody's bits are known to be equal."""
    n_gpu_layers: int = 0
    """Of what is loaded; the output matrix counts as one."""
    n_threads: int = 0
    """With which it computes: fewer than configured while other workers are at work, too. 0 without one."""


def statistics_of(hosted: HostedModel) -> WorkerStatistics:
    worker = hosted.worker
    return WorkerStatistics(
        model_id=hosted.model.model_id,
        pid=worker.pid if worker else None,
        loaded=hosted.wanted,
        weights_bytes=hosted.memory.weights_bytes,
        n_pending=worker.n_pending if worker else 0,
        n_calls=worker.n_calls if worker else 0,
        bytes_sent=worker.bytes_sent if worker else 0,
        bytes_received=worker.bytes_received if worker else 0,
        n_starts=hosted.n_starts,
        last_end=hosted.last_end,
        n_failures=hosted.n_failures,
        last_failure=hosted.last_failure,
        kernels=hosted.kernels,
        kernel_class=hosted.kernel_class,
        n_gpu_layers=hosted.n_gpu_layers,
        n_threads=worker.n_threads if worker else 0,
    )


class WorkerPool:
    """The node's interface to its workers. Some subjects have objects of their own: `ring`, `cuts`, and
    behind the pool's methods `layers`, `prefixes` and `repairs`."""

    def __init__(
        self,
        settings: WorkerSettings,
        runtime_dir: Path,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`runtime_dir`: for sockets, made private. `on_change` is called after `models()` has changed."""
        self._settings = settings
        self._hosts = hosts = HostedModels(settings, runtime_dir, command)
        hosts.on_notice = self._notice
        self.gpus = hosts.gpus
        self.ring = RingCalls(hosts)
        self.cuts = CutTrials(hosts)
        self.on_notice: Callable[[ModelId, AnyWorkerMessage, memoryview], None] | None = None
        """(model id, message, payload): what a worker says unasked."""
        layers = HeldLayers(hosts, on_change or (lambda: None))
        self.load, self.unload, self._forget_layers = layers.load, layers.unload, layers.forget
        self.loaded, self.loaded_with, self.models = layers.loaded, layers.loaded_with, layers.models
        self.cut = layers.cut
        self.memory, self.context_sizes = layers.memory, layers.context_sizes
        self.free_bytes = layers.free_bytes
        self.kernel_class = layers.kernel_class
        self.serves_without_file = layers.serves_without_file
        self._prefixes = prefixes = KeptPrefixes(hosts, self.cancel)
        self.look_up_prefix, self.check_prefix = prefixes.look_up_prefix, prefixes.check_prefix
        self.kept_prefixes, self.name_prefix = prefixes.kept_prefixes, prefixes.name_prefix
        self.export_prefix, self.import_prefix = prefixes.export_prefix, prefixes.import_prefix
        self._encoders = encoders = PictureEncoders(hosts)
        self.encode_picture, self.check_projector = encoders.encode_picture, encoders.check_projector
        self.recode_picture, self.can_recode_now = encoders.recode_picture, encoders.can_recode_now
        self.keep_projector_open, self.is_projector_open = encoders.keep_open, encoders.is_open
        self.close_projectors = encoders.close
        self.kept_pictures = encoders.kept
        self._text_encoders = texts = TextEncoders(hosts)
        self.encode_text = texts.encode_text
        repairs = HeldRequests(hosts)
        self.hold, self.resume, self.read_journal = repairs.hold, repairs.resume, repairs.read_journal

    def __repr__(self) -> str:
        return f"<WorkerPool {list(self._hosts)}>"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[WorkerPool]:
        """The pool works inside this block; when it is left, every worker has ended."""
        async with self._hosts.running():
            yield self

    async def forget(self, model_id: ModelId) -> None:
        """End the model's workers; nothing of it is wanted any more."""
        await self._forget_layers(model_id)
        await self._encoders.forget(model_id)
        await self._text_encoders.forget(model_id)

    async def info(self, model: ModelFile) -> Opened:
        """What the worker found in the file."""
        hosted = self._hosts.of(model)
        await hosted.ready()
        assert hosted.opened is not None
        return hosted.opened

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
        template: str = "",
        place: TextPlace = "whole",
    ) -> TokenIds:
        """i32 [n]. `text` as it is, or `messages` through the chat template (`template`, or the model's).
        `place`: of a `text` that is a piece of a rendered template. Raises InvalidRequest (template) ..."""
        worker = await self._hosts.ready(model)
        message = Tokenize(
            id=worker.new_id(),
            text=text,
            messages=messages,
            tools=tools,
            effort=effort,
            template=template,
            place=place,
        )
        _, payload = await worker.call(message, Tokens, timeout_s=self._settings.call_timeout_s)
        return checked_tensor(payload, "tokens", np.dtype(np.int32), 1)

    async def check_grammar(self, model: ModelFile, sampling: Sampling) -> None:
        """Raises InvalidRequest for a grammar or JSON schema that cannot be followed, Overloaded ..."""
        if not sampling.grammar and not sampling.json_schema:
            return
        worker = await self._hosts.ready(model)
        message = CheckGrammar(id=worker.new_id(), sampling=sampling)
        await worker.call(message, Done, timeout_s=self._settings.call_timeout_s)

    async def apply_template(
        self,
        model: ModelFile,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
        template: str = "",
        *,
        is_to_answer: bool = True,
    ) -> str:
        """The text that a model would read. Raises InvalidRequest (template) ..."""
        worker = await self._hosts.ready(model)
        message = ApplyTemplate(
            id=worker.new_id(),
            messages=messages,
            tools=tools,
            effort=effort,
            template=template,
            is_to_answer=is_to_answer,
        )
        return await self._text(worker, message)

    async def detokenize(self, model: ModelFile, tokens: TokenIds) -> str:
        """i32 [n] -> text with special tokens; broken characters at its ends are replaced."""
        worker = await self._hosts.ready(model)
        return await self._text(worker, Detokenize(id=worker.new_id()), encode_tensor(tokens))

    async def pieces(self, model: ModelFile, tokens: TokenIds) -> tuple[bytes, ...]:
        """What each of i32 [n] adds to a text that is generated; not always whole characters."""
        worker = await self._hosts.ready(model)
        message = Detokenize(id=worker.new_id(), as_generated=True)
        data = await self._bytes(worker, message, encode_tensor(tokens))
        try:
            return decode_pieces(data, len(tokens))
        except ProtocolError as error:
            raise WorkerError(f"the worker's answer cannot be read: {error}") from None

    async def end_tokens(self, model: ModelFile) -> frozenset[int]:
        """Those that end a text."""
        return frozenset((await self.info(model)).eos_tokens)

    async def infill_tokens(self, model: ModelFile) -> InfillTokens | None:
        """None: the model fills nothing in."""
        return (await self.info(model)).infill or None

    async def embed(self, model: ModelFile, tokens: TokenIds) -> Hidden:
        """i32 [n] -> f32 [n, n_embd]."""
        worker = await self._hosts.ready(model)
        _, payload = await worker.call(
            Embed(id=worker.new_id()),
            LayerResult,
            payload=encode_tensor(tokens),
            timeout_s=self._settings.call_timeout_s,
        )
        return checked_tensor(payload, "embeddings", np.dtype(np.float32), 2, n_rows=len(tokens))

    async def forward(
        self,
        model: ModelFile,
        *,
        request_id: str,
        layers: LayerRange,
        position: int,
        tensor: npt.NDArray[Any],
        want: Want,
        sampling: Sampling | None = None,
        n_prompt_tokens: int = 0,
        generated: tuple[int, ...] = (),
        scored: tuple[int, ...] = (),
        ring: RingHint = NO_RING,
        rounded: bool = False,
        exact_rows: int = 0,
        kv_type: KvType | None = None,
        picture_runs: tuple[PictureRun, ...] = (),
        owner: str = "",
    ) -> ForwardResult:
        """Run `layers` over f32 [n, n_embd], or over i32 [n] token ids where they begin at 0. `generated`:
        with the first token that is wanted here, those that came before it elsewhere. `scored`: with
        "scores", the token that follows each row. `rounded`: hidden states are to be what q8_0 can carry.
        `exact_rows`: of an exact request, how many rows it has at most; `kv_type`: with its first rows, how
        its keys and values are kept, None: as those of others. `picture_runs`: of the request's rows
        those that stand on a grid or see each other. `owner`: who shares the worker's time as one with
        others; "": this node's own users.

        The tensor must not be changed before this returns. Raises ContextFull, WorkerError, WorkerDied,
        DeadlineExceeded.
        """
        worker = await self._hosts.of(model).worker_for(request_id, position)
        message = Forward(
            id=worker.new_id(),
            request_id=request_id,
            start=layers.start,
            end=layers.end,
            position=position,
            want=want,
            sampling=sampling,
            n_prompt_tokens=n_prompt_tokens,
            generated=generated,
            scored=scored,
            seat=ring.seat,
            timings=ring.timings,
            waited_s=ring.waited_s,
            resent=ring.resent,
            number=ring.number,
            fresh=ring.fresh,
            rounded=rounded,
            exact_rows=exact_rows,
            kv_type=kv_type or UNSET,
            picture_runs=picture_runs,
            owner=owner or UNSET,
        )
        expects = Token if want == "token" else LayerResult
        result, payload = await worker.call(
            message,
            (expects, Done) if ring.seat is not None else (expects,),
            payload=encode_tensor(tensor),
            timeout_s=self._settings.call_timeout_s,
        )
        n_top = sampling.top_logprobs if sampling is not None else 0
        return forward_result(result, payload, want=want, n_rows=len(tensor), n_top=n_top)

    @asynccontextmanager
    async def generate(
        self,
        model: ModelFile,
        *,
        request_id: str,
        tokens: TokenIds,
        sampling: Sampling,
        n_generated: int = 0,
        session: str = "",
        own_kv: bool = False,
        clients_of: str = "",
        owner: str = "",
    ) -> AsyncIterator[TokenStream]:
        """The whole decode loop in the worker, which must hold every layer: iterate the stream for (Token,
        bytes). The last `n_generated` of `tokens` are no prompt but what came of it elsewhere. `own_kv`: no
        KV is used that another node computed and that was not checked. `clients_of`: the other node whose
        client asks; KV is shared to the token among its clients. `owner`: as in `forward`.

        Leaving early cancels it. Raises as `forward` does, from the iteration.
        """
        worker = await self._hosts.ready(model)
        message = Generate(
            id=worker.new_id(),
            request_id=request_id,
            sampling=sampling,
            n_generated=n_generated,
            session_id=session,
            own_kv=own_kv,
            clients_of=clients_of or UNSET,
            owner=owner or UNSET,
        )
        stream = await worker.generate(
            message, encode_tensor(tokens), silence_s=self._settings.call_timeout_s
        )
        try:
            yield stream
        finally:
            if not stream.finished:
                await self._cancel(worker, request_id)
            worker.forget(message.id)

    async def release(self, model_id: ModelId, request_id: str) -> None:
        """Free the request's KV; unknown requests and absent workers are fine."""
        self._forget(model_id, request_id)
        worker = self._hosts.worker(model_id)
        if worker is not None:
            await worker.call(
                ReleaseRequestKv(id=worker.new_id(), request_id=request_id),
                Done,
                timeout_s=self._settings.call_timeout_s,
            )

    async def cancel(self, model_id: ModelId, request_id: str) -> None:
        """Stop the request wherever it is and free its KV; unknown requests and absent workers are fine."""
        self._forget(model_id, request_id)
        worker = self._hosts.worker(model_id)
        if worker is not None:
            await worker.call(
                CancelRequest(id=worker.new_id(), request_id=request_id),
                Done,
                timeout_s=self._settings.call_timeout_s,
            )

    async def stop(self, model_id: ModelId) -> None:
        """End the model's worker; what was loaded stays wanted, and the next call loads it again."""
        hosted = self._hosts.get(model_id)
        if hosted is not None:
            await hosted.stop("was stopped")

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        return tuple(statistics_of(hosted) for hosted in self._hosts)

    def _forget(self, model_id: ModelId, request_id: str) -> None:
        if (hosted := self._hosts.get(model_id)) is not None:
            hosted.forget(request_id)

    async def _text(self, worker: Worker, message: AnyDaemonMessage, payload: Payload = b"") -> str:
        return str(await self._bytes(worker, message, payload), "utf-8", "replace")

    async def _bytes(self, worker: Worker, message: AnyDaemonMessage, payload: Payload) -> bytes:
        _, data = await worker.call(message, Text, payload=payload, timeout_s=self._settings.call_timeout_s)
        return bytes(data)

    def _notice(
        self, model_id: ModelId, worker: Worker, message: AnyWorkerMessage, payload: memoryview
    ) -> None:
        if isinstance(message, PrefixManifestUpdate):
            self._prefixes.take_manifest(model_id, worker, message, payload)
        elif self.on_notice is not None:
            self.on_notice(model_id, message, payload)

    async def _cancel(self, worker: Worker, request_id: str) -> None:
        if not worker.alive:
            return

        async def work() -> None:
            message = CancelRequest(id=worker.new_id(), request_id=request_id)
            await worker.call(message, Done, timeout_s=self._settings.call_timeout_s)

        try:
            cancelling = self._hosts.background(work)
        except WorkerError:
            return  # the pool has ended, and the worker with it
        deadline = trio.current_time() + self._settings.cancel_timeout_s
        with trio.CancelScope(deadline=deadline, shield=True):
            try:
                await cancelling.wait()
            except SwarmLLMError as error:
                log.info("a request could not be cancelled: %s", error.message)
