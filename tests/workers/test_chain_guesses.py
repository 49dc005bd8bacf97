"""Guesses over a model that is cut: the text is the same to the last bit, in fewer trips."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from node_ids import A, B, C

from swarmllm.guide import DRAFT_PATH, GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import GUESSES_MAX, WINDOW_ROWS_MAX
from swarmllm_proto.tensors import decode_tensor, encode_tensor
from swarmllm_workers.kernels.small_batches import ROWS_MAX
from swarmllm_workers.speculation.chain_guesser import ChainGuesser, JobLimits
from swarmllm_workers.speculation.cost_gate import PAUSE_MAX, PAUSE_MIN, VAIN_MAX, CostGate
from swarmllm_workers.speculation.drafting import Draft, Drafter, NgramLookup, Remembered, Worth

from .client import DEADLINE_S, Answer, Worker
from .ring_of_two import NODES, SPLIT, RingOfTwo, give, open_halves

MakeRing = Callable[..., RingOfTwo]

N_TOKENS = 120
LINE_S = 0.016
GREEDY = ipc.Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": replace(GREEDY, temperature=0.7, seed=11),
    "logprobs": replace(GREEDY, logprobs=True, top_logprobs=2),
    "penalties": replace(GREEDY, frequency_penalty=0.3, presence_penalty=0.2),
}
GRAMMARS = {
    "schema": {
        "json_schema": json.dumps(
            {"type": "array", "items": {"enum": ["a stage", "a layer"]}, "minItems": 12, "maxItems": 12}
        )
    },
    "gbnf": {"grammar": 'root ::= ("a stage computes layers. "){12}'},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The whole model, without guesses."""
    worker = Worker(tmp_path_factory.mktemp("whole") / "socket")
    worker.open(GUIDE_PATH, (0, 12), n_prefixes=0)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("halves")
    workers = (Worker(folder / "first"), Worker(folder / "last"))
    open_halves(workers, n_slots=2, ngram_max_size=4, ngram_num_pred_tokens=10)
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def make_ring(halves: tuple[Worker, Worker]) -> Iterator[MakeRing]:
    with rings_of(halves) as make:
        yield make


@pytest.fixture
def make_fresh_ring(tmp_path: Path) -> Iterator[MakeRing]:
    """Of workers that have measured nothing yet."""
    workers = (Worker(tmp_path / "first"), Worker(tmp_path / "last"))
    open_halves(workers, n_slots=2, ngram_max_size=4, ngram_num_pred_tokens=10)
    with rings_of(workers) as make:
        yield make
    for worker in workers:
        worker.close()


@contextmanager
def rings_of(halves: tuple[Worker, Worker]) -> Iterator[MakeRing]:
    made: list[RingOfTwo] = []

    def make(origin: NodeId = A) -> RingOfTwo:
        ring = RingOfTwo(halves, origin)
        lines.append(link_by_line(ring, 0))
        ring.link(1)
        made.append(ring)
        return ring

    lines: list[threading.Thread] = []
    yield make
    for ring in made:
        ring.clean_up()
    for line in lines:
        line.join(DEADLINE_S)


def n_trips(ring: RingOfTwo, request_id: str = "r") -> int:
    """Tokens of one trip share its timings."""
    return len({token.timings for token in ring.tokens[request_id].values()})


def deepest(ring: RingOfTwo, request_id: str = "r") -> int:
    """Tokens of the trip that brought most."""
    return max(Counter(token.timings for token in ring.tokens[request_id].values()).values())


def link_by_line(ring: RingOfTwo, sender: int) -> threading.Thread:
    """A link over a line with a delay, as between two machines: there it pays to guess."""
    ours, entry = socket.socketpair()
    exit_, theirs = socket.socketpair()
    give(ring.workers[1 - sender], theirs, peer=NODES[sender], direction="receiving")
    give(ring.workers[sender], ours, peer=NODES[1 - sender], direction="sending")

    def carry() -> None:
        with entry, exit_, suppress(OSError):
            while piece := entry.recv(1 << 16):
                time.sleep(LINE_S)
                exit_.sendall(piece)

    line = threading.Thread(target=carry)
    line.start()
    return line


def prompt_of(worker: Worker) -> np.ndarray:
    return worker.tokenize(messages=[{"role": "user", "content": "What is a pipeline?"}])


@pytest.mark.parametrize("origin", [A, B, C], ids=["first", "last", "elsewhere"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_text_with_guesses_is_the_text_without(
    make_ring: MakeRing, plain: Worker, origin: NodeId, kind: str
) -> None:
    sampling = SAMPLINGS[kind]
    prompt = prompt_of(plain)
    due = plain.generate(prompt, sampling=sampling)
    ring = make_ring(origin)
    ring.start("r", prompt, sampling)
    ring.run(lambda: ring.finished("r"))
    assert (ring.result("r"), ring.text["r"]) == (due.tokens, due.text)
    last = ring.tokens["r"][N_TOKENS - 1]
    assert last.guessed is not UNSET
    n_guessed, n_right = last.guessed
    assert n_guessed >= n_right > 3
    assert n_trips(ring) < N_TOKENS - n_right / 2, "guesses that are right save trips"


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_head_that_knows_the_prompt_remembers_how_it_went_on(
    make_ring: MakeRing, plain: Worker, kind: str
) -> None:
    sampling = SAMPLINGS[kind]
    prompt = plain.tokenize(messages=[{"role": "user", "content": f"What is a layer? ({kind})"}])
    due = plain.generate(prompt, sampling=sampling)
    needed, depths = [], []
    for request_id in ("first", "again"):
        ring = make_ring(A)
        ring.start(request_id, prompt, sampling, tells_prompt=True)
        ring.run(lambda ring=ring, each=request_id: ring.finished(each))  # type: ignore[misc]
        assert (ring.result(request_id), ring.text[request_id]) == (due.tokens, due.text)
        needed.append(n_trips(ring, request_id))
        depths.append(deepest(ring, request_id))
        ring.clean_up()
    assert needed[1] < N_TOKENS / 4, needed
    assert depths[1] >= ROWS_MAX, "as many as a stage computes in one batch"


def test_the_second_request_of_a_ring_has_guesses_behind_its_first_token(
    make_ring: MakeRing, plain: Worker
) -> None:
    """The daemons bring the row that gives it, and say nothing of what the stages take."""
    prompt = plain.tokenize(messages=[{"role": "user", "content": "What is a ring?"}])
    due = plain.generate(prompt, sampling=GREEDY)
    shared_trips = []
    for index, name in enumerate(("one", "one", "other", UNSET)):
        ring, request_id = make_ring(A), f"{index}"
        ring.start(request_id, prompt, GREEDY, tells_prompt=True, ring=name)
        ring.run(lambda ring=ring, each=request_id: ring.finished(each))  # type: ignore[misc]
        assert (ring.result(request_id), ring.text[request_id]) == (due.tokens, due.text)
        tokens = ring.tokens[request_id]
        shared_trips.append(tokens[1].timings == tokens[2].timings)
        ring.clean_up()
    assert shared_trips == [False, True, False, False]


def early(
    ring: RingOfTwo,
    request_id: str,
    prompt: np.ndarray,
    sampling: ipc.Sampling,
    name: str,
    n_last: int = 0,
) -> tuple[int, int]:
    """A request that begins when the answer it had before waits at the first stage. Returns how many of its
    guesses there were, and how many right."""
    ring.start(request_id, prompt, sampling, tells_prompt=True, ring=name, feeds=False)
    ring.run(lambda: waits(ring, request_id))
    assert not ring.tokens[request_id]
    ring.feed(request_id, prompt, n_last)
    ring.run(lambda: ring.finished(request_id))
    last = ring.tokens[request_id][len(ring.tokens[request_id]) - 1]
    assert last.guessed is not UNSET
    return last.guessed


def waits(ring: RingOfTwo, request_id: str) -> bool:
    """A job of the request is at its first stage, and has not been run."""
    turned = [each for each in ring.heard if isinstance(each, ipc.Turned) and each.request_id == request_id]
    return bool(turned) and turned[-1].stage == 0 and turned[-1].running


EARLY = {**SAMPLINGS, **{kind: replace(GREEDY, ignore_eos=False, **GRAMMARS[kind]) for kind in GRAMMARS}}


@pytest.mark.parametrize("origin", [A, B, C], ids=["first", "last", "elsewhere"])
@pytest.mark.parametrize("kind", EARLY)
def test_the_answer_that_a_prompt_had_leaves_before_its_first_token(
    make_ring: MakeRing, plain: Worker, kind: str, origin: NodeId
) -> None:
    """It waits at each stage for the prompt's rows."""
    sampling = replace(EARLY[kind], max_tokens=40)
    # Of fewer than 64 rows, which have the bits of single ones in whatever chunks they come.
    prompt = plain.tokenize(messages=[{"role": "user", "content": f"{kind} {(A, B, C).index(origin)}?"}])
    assert len(prompt) < 64
    due = plain.generate(prompt, sampling=sampling)
    ring = make_ring(origin)
    ring.start("first", prompt, sampling, tells_prompt=True, ring="early")
    ring.run(lambda: ring.finished("first"))
    ring.cancel()
    # One by one, so that the first job shares a batch with the last row, or with several; or none with all.
    for n_last in (0, 1, 3):
        request_id = f"again {n_last}"
        n_guessed, n_right = early(ring, request_id, prompt, sampling, "early", n_last)
        assert (ring.result(request_id), ring.text[request_id]) == (due.tokens, due.text)
        assert n_right > ROWS_MAX
        assert n_guessed <= len(due.tokens), "nothing is sent that cannot be asked for"
        assert n_trips(ring, request_id) <= n_trips(ring, "first")
        ring.cancel()


@pytest.mark.parametrize("n_last", [0, 1], ids=["apart", "in one batch"])
@pytest.mark.parametrize(("origin", "n_same"), [(A, 0), (B, 0), (A, 3)])
def test_an_early_answer_that_is_another_one_is_refused(
    make_fresh_ring: MakeRing, plain: Worker, origin: NodeId, n_same: int, n_last: int
) -> None:
    """With its first token, or behind it."""
    prompt, sampling = prompt_of(plain), replace(GREEDY, max_tokens=40)
    remembered = plain.generate(prompt, sampling=sampling).tokens
    other = replace(sampling, logit_bias=((remembered[n_same], -100.0),))
    due = plain.generate(prompt, sampling=other)
    n_common = next(i for i, pair in enumerate(zip(due.tokens, remembered, strict=True)) if len({*pair}) > 1)
    ring = make_fresh_ring(origin)
    ring.start("first", prompt, sampling, tells_prompt=True, ring="other")
    ring.run(lambda: ring.finished("first"))
    ring.cancel()
    n_guessed, n_right = early(ring, "again", prompt, other, "other", n_last)
    assert (ring.result("again"), ring.text["again"]) == (due.tokens, due.text)
    assert n_guessed > n_right >= n_common


def test_an_early_answer_whose_link_is_lost_comes_by_the_daemons(make_ring: MakeRing, plain: Worker) -> None:
    prompt = plain.tokenize(messages=[{"role": "user", "content": "Which way?"}])
    due = plain.generate(prompt, sampling=GREEDY)
    ring = make_ring(A)
    ring.start("first", prompt, GREEDY, tells_prompt=True, ring="lost")
    ring.run(lambda: ring.finished("first"))
    ring.cancel()
    ring.start("again", prompt, GREEDY, tells_prompt=True, ring="lost", feeds=False)
    ring.run(lambda: waits(ring, "again"))
    ring.close_links(1)
    ring.feed("again", prompt)
    ring.run(lambda: ring.finished("again"))
    assert (ring.result("again"), ring.text["again"]) == (due.tokens, due.text)
    assert ring.n_brought > 2


def test_without_a_link_nothing_is_guessed_behind_the_first_token(
    halves: tuple[Worker, Worker], make_ring: MakeRing, plain: Worker
) -> None:
    """Its job goes by the daemon of the last stage, which knows of no guesses."""
    prompt = plain.tokenize(messages=[{"role": "user", "content": "What is a link?"}])
    due = plain.generate(prompt, sampling=GREEDY)
    ring = make_ring(A)
    ring.start("linked", prompt, GREEDY, tells_prompt=True, ring="unlinked")
    ring.run(lambda: ring.finished("linked"))
    ring.clean_up()
    ring = RingOfTwo(halves, A)
    ring.start("unlinked", prompt, GREEDY, tells_prompt=True, ring="unlinked")
    ring.run(lambda: ring.finished("unlinked"))
    assert ring.result("unlinked") == due.tokens
    last = ring.tokens["unlinked"][N_TOKENS - 1]
    assert last.guessed in (UNSET, (0, 0))
    ring.clean_up()


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_of_a_grammar_is_guessed_too(
    make_ring: MakeRing, plain: Worker, kind: str, temperature: float
) -> None:
    sampling = replace(GREEDY, temperature=temperature, seed=5, ignore_eos=False, **GRAMMARS[kind])
    prompt = prompt_of(plain)
    due = plain.generate(prompt, sampling=sampling)
    assert due.text.startswith({"schema": b"[", "gbnf": b"a stage computes layers. a stage"}[kind])
    ring = make_ring(A)
    ring.start("r", prompt, sampling)
    ring.run(lambda: ring.finished("r"))
    assert (ring.result("r"), ring.text["r"]) == (due.tokens, due.text)
    assert n_trips(ring) < len(due.tokens)


def test_what_is_kept_for_a_repair_and_for_the_next_turn_holds_no_refused_rows(
    make_ring: MakeRing, plain: Worker
) -> None:
    prompt, sampling = prompt_of(plain), SAMPLINGS["seeded"]
    ring = make_ring(A)
    ring.start("r", prompt, sampling)
    ring.run(lambda: ring.finished("r"))
    last = ring.tokens["r"][N_TOKENS - 1]
    assert last.guessed is not UNSET
    assert last.guessed[0] > last.guessed[1], "some were refused"
    tokens = np.array(ring.result("r"), np.int32)
    # The last token has no row; the rows before it are those of a run in which nobody guesses.
    n_rows = N_TOKENS - 1
    plain.hidden(prompt, request_id="single", start=0, end=SPLIT, position=0)
    alone = [
        plain.hidden(tokens[i : i + 1], request_id="single", start=0, end=SPLIT, position=len(prompt) + i)
        for i in range(n_rows)
    ]
    plain.call(ipc.CancelRequest, request_id="single")
    for stage in range(2):
        sent = told(ring, stage, ipc.ReadJournal, end=SPLIT, position=len(prompt), n_rows=n_rows)
        assert isinstance(sent.message, ipc.LayerResult), sent.message
        assert np.array_equal(decode_tensor(sent.payload), np.concatenate(alone))
    # The same for what the next turn goes on from.
    at = (len(prompt) + n_rows) // BLOCK_TOKENS * BLOCK_TOKENS
    index = at - len(prompt)
    assert 0 < index < n_rows
    names = b"".join(bytes([i]) * 32 for i in range(at // BLOCK_TOKENS))
    layers = {"start": 0, "end": SPLIT}
    told(ring, 0, ipc.PrefixFetchProbe, names, **layers)
    ring.cancel()
    probed = told(ring, 0, ipc.PrefixFetchProbe, names, request_id="next", **layers).message
    assert probed.n_blocks == at // BLOCK_TOKENS
    fields = {"request_id": "next", "position": at, "want": "hidden", **layers}
    row = told(ring, 0, ipc.Forward, encode_tensor(tokens[index : index + 1]), **fields)
    assert np.array_equal(decode_tensor(row.payload), alone[index])
    told(ring, 0, ipc.CancelRequest, request_id="next")


def told(ring: RingOfTwo, stage: int, kind: type[Any], payload: Any = b"", **fields: Any) -> Answer:
    """What a worker answers; what it says besides is heard as ever."""
    worker = ring.workers[stage]
    if not isinstance(payload, bytes):
        payload = b"".join(payload)
    call_id = worker.send(kind, payload, **{"request_id": "r", **fields})
    while (answer := worker.receive_any()).message.id != call_id:
        ring._hear(stage, answer)
    return answer


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    """The last one has the draft model, and looks nothing up."""
    folder = tmp_path_factory.mktemp("drafting")
    workers = (Worker(folder / "first"), Worker(folder / "last"))
    open_halves(workers, n_slots=2, draft_path=str(DRAFT_PATH), speculative_gamma=4)
    yield workers
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_the_draft_model_guesses_at_the_head(
    drafting: tuple[Worker, Worker], plain: Worker, kind: str
) -> None:
    sampling = replace(SAMPLINGS[kind], ignore_eos=False)
    prompt = plain.tokenize(messages=[{"role": "user", "content": "How do I load a model on two nodes?"}])
    due = plain.generate(prompt, sampling=sampling)
    n_trips_of = {}
    for tells_prompt in (False, True):
        # The second request knows from the first what trips take.
        for request_id in ("first", "second"):
            ring = RingOfTwo(drafting, A)
            line = link_by_line(ring, 0)
            ring.link(1)
            ring.start(request_id, prompt, sampling, tells_prompt=tells_prompt)
            ring.run(lambda ring=ring, each=request_id: ring.finished(each))  # type: ignore[misc]
            assert (ring.result(request_id), ring.text[request_id]) == (due.tokens, due.text)
            n_trips_of[tells_prompt] = n_trips(ring, request_id)
            ring.clean_up()
            line.join(DEADLINE_S)
    assert n_trips_of[False] == len(due.tokens), "nobody guesses without the prompt"
    assert n_trips_of[True] < len(due.tokens) / 2


@pytest.mark.parametrize("n_tokens", range(90, 97))
def test_max_tokens_end_an_answer_in_the_middle_of_a_window(
    make_ring: MakeRing, plain: Worker, n_tokens: int
) -> None:
    prompt = prompt_of(plain)
    due = plain.generate(prompt, sampling=GREEDY)
    ring = make_ring(A)
    ring.start("r", prompt, replace(GREEDY, max_tokens=n_tokens))
    ring.run(lambda: ring.finished("r"))
    assert ring.result("r") == due.tokens[:n_tokens]
    assert ring.tokens["r"][n_tokens - 1].finish_reason == "length"


def test_a_stop_string_ends_an_answer_in_the_middle_of_a_window(make_ring: MakeRing, plain: Worker) -> None:
    """It begins in one token of a repeated sentence and ends in another."""
    prompt = prompt_of(plain)
    stop = ("token.TTFT is the time to first token.TTFT",)
    due = plain.generate(prompt, sampling=replace(GREEDY, stop=stop))
    assert due.done.finish_reason == "stop"
    ring = make_ring(A)
    ring.start("r", prompt, replace(GREEDY, stop=stop))
    ring.run(lambda: ring.finished("r"))
    assert (ring.result("r"), ring.text["r"]) == (due.tokens, due.text)
    assert n_trips(ring) < len(due.tokens)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("closing", ["sending", "receiving"])
def test_a_window_on_a_link_that_ends_is_neither_lost_nor_repeated(
    make_ring: MakeRing, plain: Worker, sender: int, closing: str
) -> None:
    prompt = prompt_of(plain)
    due = plain.generate(prompt, sampling=GREEDY)
    ring = make_ring(A)

    def disturb(token: object) -> None:
        n_told = len(ring.tokens["r"])
        if n_told % 9 == 5:
            ring.close_links(sender if closing == "sending" else 1 - sender)
        elif n_told % 9 == 8:
            ring.link(0)
            ring.link(1)

    ring.on_token = disturb
    ring.start("r", prompt, GREEDY)
    ring.run(lambda: ring.finished("r"))
    assert (ring.result("r"), ring.text["r"]) == (due.tokens, due.text)
    assert 2 < ring.n_brought < 2 * N_TOKENS


def test_two_requests_at_once_guess_nothing_and_neither_is_lost(make_ring: MakeRing, plain: Worker) -> None:
    prompt = prompt_of(plain)
    due = plain.generate(prompt, sampling=GREEDY)
    ring = make_ring(A)
    for request_id in ("one", "other"):
        ring.start(request_id, prompt, GREEDY)
    ring.run(lambda: ring.finished("one") and ring.finished("other"))
    for request_id in ("one", "other"):
        # Rows of several requests in one batch round differently; the guide is sure of its first words.
        assert ring.text[request_id][:40] == due.text[:40]
        assert len(ring.result(request_id)) == N_TOKENS
    assert [ring.tokens[each][N_TOKENS - 1].guessed for each in ("one", "other")] == [(0, 0), (0, 0)]


def lookup(gate: CostGate, prompt: Sequence[int] = ()) -> ChainGuesser:
    guesser = ChainGuesser(gate, lambda known: [NgramLookup(4, GUESSES_MAX)])
    if prompt:
        guesser.know(np.array(prompt, np.int32))
    return guesser


def guessed(
    guesser: ChainGuesser, text: Sequence[int], n_rows: int, n_left: int, now: float
) -> tuple[int, ...]:
    """What leaves behind the last token of `text`, in the only job that is under way."""
    (job,) = guesser.next_jobs(text, len(text) - 1, JobLimits(n_left, n_rows), now)
    assert not job.number
    assert guesser.jobs_in_flight.land(job.position, len(job.tokens)) is job
    return job.tokens[1:]


def trips(guesser: ChainGuesser, text: list[int], trip_s: Callable[[int], float]) -> list[int]:
    """Guesses of each trip in which `text` is generated; `trip_s`: what one with so many rows takes."""
    now, n_told, counts = 0.0, 1, []
    while n_told < len(text):
        guesses = guessed(guesser, text[:n_told], WINDOW_ROWS_MAX, len(text) - n_told, now)
        counts.append(len(guesses))
        now += trip_s(1 + len(guesses))
        right = 0
        while right < len(guesses) and text[n_told + right : n_told + right + 1] == [guesses[right]]:
            right += 1
        n_told = min(n_told + right + 1, len(text))
    return counts


def test_windows_are_deep_where_the_line_is_long_and_the_text_repeats() -> None:
    guesser = lookup(CostGate())
    counts = trips(guesser, [*range(10)] * 40, lambda n_rows: 0.160 + 0.001 * n_rows)
    assert max(counts) == GUESSES_MAX
    assert 400 / len(counts) > 8


def test_what_the_prompt_says_is_guessed_at_the_first_chance() -> None:
    """The answer quotes the prompt."""
    prompt = [*range(100, 160)]
    counts = trips(lookup(CostGate(), prompt), prompt[20:60], lambda n_rows: 0.160 + 0.001 * n_rows)
    assert len(counts) < 40 / 3
    assert not any(trips(lookup(CostGate()), prompt[20:60], lambda n_rows: 0.160 + 0.001 * n_rows))


class Reader:
    """Always guesses 7, and reads for 50 ms before its first guess."""

    is_free = False
    is_closed = False

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        once_s = 0.05 if history[-1] == 1 else 0.0
        n = worth("model", once_s)
        return Draft((7,) * n, "model", once_s) if n else None

    def close(self) -> None:
        self.is_closed = True


def test_a_prompt_that_comes_late_is_guessed_from_all_the_same() -> None:
    prompt, known = np.arange(100, 160, dtype=np.int32), []

    def begin(said: np.ndarray) -> list[NgramLookup]:
        known.append(len(said))
        return [NgramLookup(4, 10)]

    guesser = ChainGuesser(CostGate(plain_s=0.1), begin, lambda *answer: known.append(answer[1]))
    assert guessed(guesser, [7, 120], 7, 50, 0.1) == ()
    guesser.know(prompt)
    guesser.know(prompt[:5])
    assert guessed(guesser, [7, 120, 121], 7, 50, 0.2)[:1] == (122,)
    assert known == [0, 60], "what guesses is made anew, once"
    guesser.answered([7, 120, 121, 8], 0.3)
    assert known[-1] == [7, 120, 121, 8]


def test_what_guesses_cost_once_is_no_part_of_the_trip() -> None:
    gate = CostGate(plain_s=0.1, spare_steps=9.0)
    gate.measured("model", 0.1, 6, 0.1)
    reader = Reader()
    guesser = ChainGuesser(gate, lambda known: [reader])
    text = [1]
    n_guesses = len(guessed(guesser, text, 7, 50, 0.0))
    text += [7] * (1 + n_guesses)
    assert guessed(guesser, text, 7, 40, 0.16)
    # 160 ms went by, of which 50 for reading: 1.1 steps, of which the newest weighs a fifth.
    assert gate.n_worth("model", 6, 40)
    assert gate._cost("model", n_guesses) == pytest.approx(1.02)


def test_a_guesser_that_is_closed_lets_go_of_its_drafts() -> None:
    reader = Reader()
    guesser = ChainGuesser(CostGate(plain_s=0.1, spare_steps=9.0), lambda known: [reader])
    assert guessed(guesser, [1], 7, 50, 0.0)
    guesser.close()
    assert reader.is_closed
    assert guessed(guesser, [1, 7, 7], 7, 50, 1.0) == ()


class Wrong:
    """A draft model that is always wrong."""

    is_free = False

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        n = worth("model", 0.0)
        return Draft((-1,) * n, "model") if n else None

    def close(self) -> None:
        pass


PAIRS = [token for i in range(200) for token in (1, 2, 100 + i)]
"""A pair of tokens that always goes on otherwise: each is found again, and no guess is right."""


@pytest.mark.parametrize(
    "trip_s", [lambda n: 0.160 + 0.001 * n, lambda n: 0.02 + 0.003 * n, lambda n: 0.01 * n]
)
@pytest.mark.parametrize(
    ("drafters", "text"),
    [
        ([NgramLookup(4, GUESSES_MAX)], PAIRS),
        ([Wrong()], [*range(400)]),
        ([Remembered(1, np.array([1, 2, 3], np.int32)), Wrong()], [*range(400)]),
    ],
    ids=["looked up", "draft", "remembered and draft"],
)
def test_guesses_end_within_eight_where_they_are_always_wrong(
    drafters: list[Drafter], text: list[int], trip_s: Callable[[int], float]
) -> None:
    """Also those of the first trips with guesses, which are not timed."""
    guesser = ChainGuesser(CostGate(), lambda known: copy.deepcopy(drafters))
    guesser.know(np.array([9], np.int32))
    counts = trips(guesser, text, trip_s)
    tried = [at for at, n in enumerate(counts) if n]
    assert tried, "there is something to guess from"
    assert all(later - earlier > PAUSE_MIN for earlier, later in pairwise(tried[8:]))
    assert len(tried) <= 8 + 1 + 2 + len(text) / PAUSE_MAX
    assert all(counts[at] == 1 for at in tried[9:])


def test_what_is_looked_up_is_not_tried_again_before_it_would_have_been_right() -> None:
    passage = [*range(2000, 2060)]
    counts = trips(lookup(CostGate()), [*passage, *PAIRS, *passage], lambda n: 0.160 + 0.001 * n)
    assert sum(n > 0 for n in counts[60 : 60 + len(PAIRS)]) <= VAIN_MAX
    assert len(counts) - 60 - len(PAIRS) < 15, "the passage again"


def test_a_guesser_whose_token_was_repeated_guesses_no_more() -> None:
    guesser = lookup(CostGate(plain_s=0.1))
    text = [1, 2, 3] * 9
    assert guessed(guesser, text, 7, 50, 1.0)
    assert guessed(guesser, text, 7, 50, 2.0) == ()
    assert guessed(guesser, [*text, 1, 2], 7, 50, 3.0) == ()


def test_logprobs_are_those_of_single_rows(
    make_ring: MakeRing, halves: tuple[Worker, Worker], plain: Worker
) -> None:
    prompt, sampling = prompt_of(plain), SAMPLINGS["logprobs"]
    by_daemons = RingOfTwo(halves, A)
    by_daemons.start("alone", prompt, sampling)
    by_daemons.run(lambda: by_daemons.finished("alone"))
    by_daemons.clean_up()
    ring = make_ring(A)
    ring.start("r", prompt, sampling)
    ring.run(lambda: ring.finished("r"))
    assert n_trips(ring) < N_TOKENS
    told = [ring.tokens["r"][index].logprobs for index in range(N_TOKENS)]
    assert told == [by_daemons.tokens["alone"][index].logprobs for index in range(N_TOKENS)]
