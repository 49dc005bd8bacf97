"""Handles the daemon's messages, and validates all that they carry before the engine sees it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import UNSET

from swarmllm_proto import ipc
from swarmllm_proto.limits import WINDOW_ROWS_MAX
from swarmllm_workers.cache.manifest import PrefixManifest
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.kernel_tuning import KernelTuning
from swarmllm_workers.ring.ring import REPORT_INTERVAL_S, Ring, Watch
from swarmllm_workers.schedule.cohorts import Cohorts
from swarmllm_workers.schedule.forwards import Forwards, check_exact
from swarmllm_workers.schedule.generate_work import GenerateWork
from swarmllm_workers.schedule.planner import CAPACITY, Planner
from swarmllm_workers.schedule.read_ahead import ReadAhead
from swarmllm_workers.schedule.scheduler import Scheduler
from swarmllm_workers.schedule.thread_use import ThreadUse
from swarmllm_workers.schedule.work import Send
from swarmllm_workers.server.background import InPlace, Place
from swarmllm_workers.server.kv_handlers import EndingHandlers, PrefixHandlers
from swarmllm_workers.server.load_handlers import LoadHandlers, engine_settings, speculation_settings
from swarmllm_workers.server.text_handlers import GrammarHandlers, TextHandlers
from swarmllm_workers.server.worker_state import WorkerState
from swarmllm_workers.speculation.chain_guesser import ChainGuesser
from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.speculation import Speculation

log = logging.getLogger(__name__)

PARSING_BYTES_MAX: Final = 32 * 2**20
"""What calls that wait for the thread that parses may hold or be answered with, above which no further
message is read; one call may always wait."""
CHAIN_GATES_MAX: Final = 64
SLEEP_MAX_MS: Final = 2**30
STARVED_MS: Final = 5
PARKED_MS: Final = 100
"""Until it is seen that the grammar process is late; its answers are seen at once."""


class Handlers:
    """The state of the worker between two messages: its engine, if a model is open, and the work in
    progress."""

    def __init__(
        self,
        send: Send,
        watch: Watch,
        take_descriptor: Callable[[], int | None],
        read_ahead: ReadAhead | None = None,
        loading: Place | None = None,
        parsing: Place | None = None,
        cores: Collection[int] = (),
    ) -> None:
        """`watch`: for links; `take_descriptor`: what came along with the message that is handled. `loading`
        and `parsing`: where layers are made, and where what came from elsewhere is read; here at once where
        there is no such place. `cores`: as in `ThreadUse`."""
        self.state = WorkerState(send, loading or InPlace(), parsing or InPlace())
        self._send = send
        self._read_ahead = read_ahead
        self._take_descriptor = take_descriptor
        self._thread_use = ThreadUse(send, cores)
        self._decodings: dict[str, Decoding] = {}
        self._forwards = Forwards(send, self.state.fail, self._decodings, self._thread_use)
        self.ring = Ring(send, self._forwards, watch)
        self._arrived_at = 0.0
        self._manifest: PrefixManifest | None = None
        self._chain_gates: dict[tuple[str, str], CostGate] = {}
        """What is known of trips, by the neighbours of a last stage; the latest last."""
        self._cohorts: Cohorts | None = None
        self._looked_at_s = self._looks_away_s = 0.0
        self.grammars = GrammarHandlers(self.state, watch)
        self._layers = LoadHandlers(self.state)
        self._handlers: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.Open: self._open,
            ipc.Forward: self._forward,
            ipc.TakeLink: self._take_link,
            ipc.CloseLinks: self._close_links,
            ipc.TakePrompt: self._take_prompt,
            ipc.TakeSeat: self._take_seat,
            ipc.Generate: self._generate,
            ipc.UseThreads: self._use_threads,
            ipc.Shutdown: self._shutdown,
            ipc.OpenProjector: _refuse_pictures,
            ipc.EncodePicture: _refuse_pictures,
            ipc.EncodeSound: _refuse_pictures,
            **TextHandlers(self.state).by_type,
            **self.grammars.by_type,
            **PrefixHandlers(self.state).by_type,
            **EndingHandlers(self.state, self._stop).by_type,
            **self._layers.by_type,
        }

    @property
    def is_full(self) -> bool:
        """Whether no further message may be handled now, because too many wait for the thread that parses
        them."""
        parsing = self.state.parsing
        return parsing.n_bytes_waiting > PARSING_BYTES_MAX and parsing.n_waiting > 1

    def handle(self, message: Any, payload: memoryview) -> None:
        self._arrived_at = time.perf_counter()
        self._forwards.has_run_alone = False
        try:
            self._handlers[type(message)](message, payload)
        except Exception as error:
            self.state.fail(message.id, error, getattr(message, "request_id", ""))

    def pause_ms(self) -> int | None:
        """How long the worker may sleep: without work until kept KV expires, or the daemon is due a report
        of a ring (what has expired is dropped, what is due is told); not at all with work, and a moment where
        all of that waits for room."""
        self._forwards.polled_at_s = time.perf_counter()
        if self.state.scheduler is not None and self.state.scheduler.works:
            self._tell_prefixes()
            self._forwards.has_run_alone = False
            self.grammars.pause_ms()
            if self.state.scheduler.is_parked:
                return PARKED_MS
            return STARVED_MS if self.state.scheduler.is_starved else 0
        if self.state.model is None:
            return None
        now_s = time.monotonic()
        if self._forwards.has_run_alone and now_s < self._looked_at_s + self._looks_away_s:
            # Between two decode jobs nothing else happens, and to find that out takes as long as a hop.
            return int((self._looked_at_s + self._looks_away_s - now_s) * 1000) + 1
        self._forwards.has_run_alone = False
        self._layers.tidy()
        until_s = self.state.model.expire()
        self._tell_prefixes()
        sleeps_ms = [SLEEP_MAX_MS if until_s is None else min(int(until_s * 1000) + 1, SLEEP_MAX_MS)]
        due_ms = self.grammars.pause_ms(), self.ring.send_reports(), self._thread_use.pause_ms()
        sleeps_ms += [each for each in due_ms if each is not None]
        self._looked_at_s, self._looks_away_s = now_s, min(min(sleeps_ms) / 1000, REPORT_INTERVAL_S)
        return min(sleeps_ms)

    def _tell_prefixes(self) -> None:
        if self._manifest is not None and self.state.model is not None:
            self._manifest.tell(self.state.model.prefixes)

    def step(self) -> None:
        """Run one round of the works in progress."""
        if self.state.scheduler is not None and self.state.speculation is not None:
            self._thread_use.begins()
            self.state.scheduler.step()
            self.state.speculation.settle(is_idle=not self.state.scheduler.works)
            self._thread_use.stepped()

    def _open(self, message: ipc.Open, _payload: memoryview) -> None:
        if self.state.model is not None:
            raise CallError("bad_message", "a model is open already", "type")
        engine = Engine(
            Path(message.path),
            Path(message.cache_dir),
            engine_settings(message, self._read_ahead, self._thread_use.threads),
            owns_path=message.owns_path,
        )
        engine.begin = partial(self.state.loading.begin, fail=_log_failure)
        self.state.model = engine
        self.grammars.open(engine.n_vocab)
        self._manifest = PrefixManifest(self._send) if message.tell_prefixes else None
        self._thread_use.configure(message.n_threads)
        self.ring.has_spare_core = self._thread_use.has_spare_core
        self.state.speculation = Speculation(engine, speculation_settings(message))
        kept_in = Path(message.kernel_timings) if message.kernel_timings else None
        self.state.kernels = KernelTuning(message.kernels, kept_in, rows_max=message.prefill_chunk_tokens)
        planner = Planner(
            chunk=min(message.prefill_chunk_tokens, CAPACITY - 1), batching=message.continuous_batching
        )
        if message.continuous_batching:
            self._cohorts = Cohorts(engine.n_layers)
        self.state.scheduler = Scheduler(
            engine, planner, self.state.fail_work, self._read_ahead, self._cohorts, self.ring
        )
        self._forwards.open(engine, self.state.scheduler, self.ring, self._cohorts)
        self._send(
            ipc.Opened(
                id=message.id,
                architecture=engine.architecture_name,
                name=engine.name,
                n_layers=engine.n_layers,
                n_embd=engine.n_embd,
                n_vocab=engine.n_vocab,
                context_length=engine.context_length,
                cut_alignment=engine.rule.cut_alignment,
                whole_reason=engine.rule.whole_reason,
                eos_tokens=tuple(sorted(engine.vocabulary.end_tokens)),
                infill=engine.vocabulary.infill_tokens() or UNSET,
                has_chat_template=bool(engine.template_source),
            )
        )

    def _forward(self, message: ipc.Forward, payload: memoryview) -> None:
        self.state.engine()
        self._forwards.add(message, payload, self._arrived_at)

    def _take_link(self, message: ipc.TakeLink, payload: memoryview) -> None:
        descriptor = self._take_descriptor()
        if descriptor is None:
            raise CallError("bad_message", "no socket came with it", "type")
        self.ring.take_link(message, payload, socket.socket(fileno=descriptor))
        self._send(ipc.Done(id=message.id))

    def _close_links(self, message: ipc.CloseLinks, _payload: memoryview) -> None:
        self.ring.close_links(message.peer)
        self._send(ipc.Done(id=message.id))

    def _take_seat(self, message: ipc.TakeSeat, _payload: memoryview) -> None:
        if message.end > self.state.engine().n_layers:
            raise CallError("bad_message", f"the model has {self.state.engine().n_layers} layers", "end")
        if (message.sampling is not None) != (message.end == self.state.engine().n_layers):
            raise CallError("bad_message", "the last stage samples, and no other", "sampling")
        check_exact(message)
        self.ring.take_seat(message, *self._guessing(message))
        self._send(ipc.Done(id=message.id))

    def _take_prompt(self, message: ipc.TakePrompt, payload: memoryview) -> None:
        seat = self.ring.seat(message.request_id, message.stage)
        if seat is not None and seat.guesser is not None:
            prompt, n_due = self.state.tokens(payload), seat.message.n_prompt_tokens
            if len(prompt) != n_due:
                raise CallError("bad_tensor", f"{len(prompt)} tokens of a prompt of {n_due}", "payload")
            seat.guesser.know(prompt)
            if message.begins is True:
                self._forwards.launch_early(seat)
        self._send(ipc.Done(id=message.id))

    def _guessing(self, message: ipc.TakeSeat) -> tuple[int, ChainGuesser | None]:
        """How many rows the stage takes in one job, and what guesses where it is the last one."""
        speculation, engine = self.state.speculation, self.state.engine()
        if speculation is None or engine.is_recurrent or message.exact_rows:
            return 1, None
        if message.sampling is None or not speculation.guesses_at_head:
            return WINDOW_ROWS_MAX, None
        key = message.before, message.after
        gate = self._chain_gates.pop(key, CostGate()).successor()
        self._chain_gates[key] = gate
        if len(self._chain_gates) > CHAIN_GATES_MAX:
            del self._chain_gates[next(iter(self._chain_gates))]
        return WINDOW_ROWS_MAX, ChainGuesser(
            gate,
            lambda prompt: speculation.begin_at_head(engine.slots.get(message.request_id), prompt),
            speculation.answered,
            speculation.recall,
        )

    def _generate(self, message: ipc.Generate, payload: memoryview) -> None:
        engine = self.state.engine()
        tokens = self.state.tokens(payload)
        if len(tokens) == 0:
            raise CallError("bad_tensor", "the prompt has no tokens", "payload")
        if message.n_generated >= len(tokens):
            raise CallError(
                "bad_message", f"{message.n_generated} generated tokens of {len(tokens)}", "n_generated"
            )
        if self.state.running().of_request(message.request_id):
            raise CallError("bad_message", f"request {message.request_id} is running", "request_id")
        engine.release(message.request_id)
        self.state.running().add(GenerateWork(message, tokens, engine, self._send, self.state.speculation))

    def _stop(self, request_id: str) -> None:
        """Nothing of it runs, comes by links or is sampled any more; its rows stay."""
        for work in self.state.works_of(request_id):
            try:
                work.cancel()
            except CallError as error:
                self.state.fail_work(work, error)
        if self.state.scheduler is not None:
            self.state.scheduler.sweep()
        if (decoding := self._decodings.pop(request_id, None)) is not None:
            decoding.close()
        self.ring.leave(request_id)
        if self._cohorts is not None:
            self._cohorts.forget(request_id)

    def _use_threads(self, message: ipc.UseThreads, _payload: memoryview) -> None:
        self.state.engine()
        self._thread_use.use(message.n_threads)
        self.ring.has_spare_core = self._thread_use.has_spare_core
        self._send(ipc.Done(id=message.id))

    def _shutdown(self, message: ipc.Shutdown, _payload: memoryview) -> None:
        self.state.finish(message.id)

    def close(self) -> None:
        self.ring.close()
        self.state.close()


def _log_failure(error: Exception) -> None:
    log.error("what a request left behind could not be put in order", exc_info=error)


def _refuse_pictures(_message: object, _payload: memoryview) -> None:
    raise CallError("bad_message", "this worker runs layers and encodes no pictures or sounds", "type")
