"""Decode by links between real workers: the same text as the uncut model, whatever happens to the links."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from node_ids import A, B, C

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.frames import FrameDecoder, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.ring.link import SendingLink
from swarmllm_workers.ring.ring import Ring

from .client import Worker
from .conftest import StartWorker
from .link_jobs import Jobs
from .ring_of_two import NODES, SECRET, SPLIT, RingOfTwo, give, open_halves

MakeRing = Callable[..., RingOfTwo]
MakeStranger = Callable[..., "Stranger"]

N_TOKENS = 40
N_SLOTS = 3
GREEDY = ipc.Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
PROMPTS = ("What is a pipeline?", "How do I load a model?", "What does boomerang mean?")


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[np.ndarray, list[int], bytes]]:
    """By question: prompt, tokens and text of one worker with every layer."""
    worker = Worker(tmp_path_factory.mktemp("uncut") / "socket")
    try:
        worker.open(GUIDE_PATH, (0, 12))
        answers = {}
        for question in PROMPTS:
            prompt = worker.tokenize(messages=[{"role": "user", "content": question}])
            generated = worker.generate(prompt, sampling=GREEDY)
            answers[question] = (prompt, generated.tokens, generated.text)
        return answers
    finally:
        worker.close()


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, Worker]]:
    folder = tmp_path_factory.mktemp("ring")
    workers = (Worker(folder / "first"), Worker(folder / "last"))
    open_halves(workers, n_slots=N_SLOTS)
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def rings(resident: tuple[Worker, Worker]) -> Iterator[MakeRing]:
    """`rings(origin)`: two workers that have nothing to do, and no links."""
    made: list[RingOfTwo] = []

    def make(origin: NodeId = A) -> RingOfTwo:
        made.append(RingOfTwo(resident, origin))
        return made[-1]

    yield make
    for ring in made:
        ring.clean_up()


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """With the last layers, and nothing to do."""
    worker = Worker(tmp_path_factory.mktemp("last") / "socket")
    worker.open(GUIDE_PATH, (SPLIT, 12))
    yield worker
    worker.close()


@pytest.fixture
def strangers(last: Worker) -> Iterator[MakeStranger]:
    """`strangers(peer)`: somebody who has a link to `last`."""
    made: list[Stranger] = []

    def make(peer: NodeId = NODES[0]) -> Stranger:
        made.append(Stranger(last, peer))
        return made[-1]

    yield make
    for stranger in made:
        last.call(ipc.CancelRequest, request_id="r")
        last.call(ipc.CloseLinks, peer=stranger.peer)
        stranger.link.connection.close()


@pytest.mark.parametrize("origin", [A, B, C], ids=["first", "last", "elsewhere"])
def test_a_ring_of_links_gives_the_text_of_the_uncut_model(
    rings: MakeRing, uncut: dict[str, tuple[np.ndarray, list[int], bytes]], origin: str
) -> None:
    prompt, tokens, text = uncut[PROMPTS[0]]
    ring = rings(origin)
    ring.link(0)
    ring.link(1)
    ring.start("r", prompt, GREEDY)
    ring.run(lambda: ring.finished("r"))
    assert (ring.result("r"), ring.text["r"]) == (tokens, text)
    assert ring.n_brought == 2, "after the prompt no daemon is needed"
    last = ring.tokens["r"][N_TOKENS - 1]
    assert [timing.stage for timing in last.timings] == [0, 1]
    assert all(timing.busy_s >= timing.compute_s > 0 for timing in last.timings)


@pytest.mark.parametrize("origin", [A, B, C], ids=["first", "last", "elsewhere"])
def test_the_origin_of_a_ring_learns_which_stop_string_ended_it(
    rings: MakeRing, uncut: dict[str, tuple[np.ndarray, list[int], bytes]], origin: str
) -> None:
    prompt, _, text = uncut[PROMPTS[0]]
    word = text.decode()[40:46]
    ring = rings(origin)
    ring.link(0)
    ring.link(1)
    ring.start("r", prompt, replace(GREEDY, stop=("\0", word)))
    ring.run(lambda: ring.finished("r"))
    assert ring.text["r"] == text[: text.index(word.encode())]
    assert [token.stopped_by for token in ring.tokens["r"].values() if token.finish_reason] == [1]


@pytest.mark.parametrize("links", [(), (0,), (1,)])
def test_where_a_link_is_missing_the_daemons_carry_the_job(
    rings: MakeRing,
    uncut: dict[str, tuple[np.ndarray, list[int], bytes]],
    links: tuple[int, ...],
) -> None:
    prompt, tokens, _ = uncut[PROMPTS[0]]
    ring = rings()
    for sender in links:
        ring.link(sender)
    ring.start("r", prompt, GREEDY)
    ring.run(lambda: ring.finished("r"))
    assert ring.result("r") == tokens
    assert ring.n_brought >= N_TOKENS


def test_requests_share_the_links(
    rings: MakeRing, uncut: dict[str, tuple[np.ndarray, list[int], bytes]]
) -> None:
    ring = rings()
    ring.link(0)
    ring.link(1)
    for question in PROMPTS:
        ring.start(question, uncut[question][0], GREEDY)
    ring.run(lambda: all(ring.finished(question) for question in PROMPTS))
    for question in PROMPTS:
        # Rows of several requests in one batch round differently; the guide is sure of its first words.
        assert ring.text[question][:40] == uncut[question][2][:40]
    assert ring.n_brought == 2 * len(PROMPTS)


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("closing", ["sending", "receiving"])
def test_a_link_that_ends_loses_and_repeats_nothing(
    rings: MakeRing,
    uncut: dict[str, tuple[np.ndarray, list[int], bytes]],
    sender: int,
    closing: str,
) -> None:
    """Closed at either end, at many moments of the walk, and opened again."""
    prompt, tokens, text = uncut[PROMPTS[0]]
    ring = rings()
    ring.link(0)
    ring.link(1)

    def disturb(token: object) -> None:
        n_told = len(ring.tokens["r"])
        end = sender if closing == "sending" else 1 - sender
        if n_told % 5 == 2:
            ring.close_links(end)
        elif n_told % 5 == 4:
            ring.link(0)
            ring.link(1)

    ring.on_token = disturb
    ring.start("r", prompt, GREEDY)
    ring.run(lambda: ring.finished("r"))
    assert (ring.result("r"), ring.text["r"]) == (tokens, text)
    assert 2 < ring.n_brought < 2 * N_TOKENS, "links were used, and were not enough"


def test_a_killed_neighbour_is_noticed_and_its_job_handed_over(
    start_worker: StartWorker, uncut: dict[str, tuple[np.ndarray, list[int], bytes]]
) -> None:
    workers = (start_worker(), start_worker())
    open_halves(workers)
    ring = RingOfTwo(workers)
    ring.link(0)
    ring.link(1)
    ring.start("r", uncut[PROMPTS[0]][0], GREEDY)
    ring.run(lambda: len(ring.tokens["r"]) >= 5)
    workers[1].process.send_signal(signal.SIGKILL)
    relayed: list[LayerForward] = []
    while not isinstance(message := (answer := workers[0].receive_any()).message, ipc.LinkLost):
        if isinstance(message, ipc.Relay):
            (frame,) = FrameDecoder().feed(answer.payload)
            job = decode_job(frame.header, frame.payload)
            assert isinstance(job, LayerForward)
            relayed.append(job)
    if message.direction == "receiving":
        return  # It died while the job was here; the first thing that is sent there will find out.
    assert [(job.stage, job.resent) for job in relayed] == [(1, True)]


def test_a_cancelled_request_goes_on_nowhere(
    rings: MakeRing, uncut: dict[str, tuple[np.ndarray, list[int], bytes]]
) -> None:
    ring = rings()
    ring.link(0)
    ring.link(1)
    endless = ipc.Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)
    # More often than there are slots: one that was kept would be missed.
    for request_id in map(str, range(N_SLOTS + 1)):
        ring.start(request_id, uncut[PROMPTS[0]][0], endless)
        ring.run(lambda request_id=request_id: len(ring.tokens[request_id]) >= 5)
        ring.cancel()
    ring.start("r", uncut[PROMPTS[0]][0], GREEDY)
    ring.run(lambda: ring.finished("r"))
    assert ring.result("r") == uncut[PROMPTS[0]][1]
    assert all(len(ring.tokens[request_id]) < 1500 for request_id in ring.cancelled)


class Stranger:
    """Somebody with a link to a worker that has the last stage of a request."""

    def __init__(self, worker: Worker, peer: str) -> None:
        self.peer = peer
        ours, theirs = socket.socketpair()
        give(worker, theirs, peer=peer, direction="receiving")
        worker.receive(ipc.Done)
        self.link = SendingLink(ours, SECRET)
        worker.call(
            ipc.TakeSeat,
            request_id="r",
            stage=1,
            start=SPLIT,
            end=12,
            before=NODES[0],
            after=NODES[0],
            origin=NODES[0],
            n_prompt_tokens=4,
            sampling=GREEDY,
        )

    def send(self, header: bytes, payload: bytes | memoryview) -> None:
        self.link.send(encode_frame(header, payload))


def job(**changed: object) -> LayerForward:
    fields: dict[str, object] = {
        "request_id": "r",
        "step": "layer",
        "stage": 1,
        "position": 4,
        "n_tokens": 1,
    }
    return LayerForward(**(fields | changed))  # type: ignore[arg-type]


ROW = b"".join(encode_tensor(np.zeros((1, 256), np.float32)))


@pytest.mark.parametrize(
    ("peer", "changed"),
    [
        pytest.param(C, {}, id="not the node before"),
        pytest.param(NODES[0], {"request_id": "other"}, id="unknown request"),
        pytest.param(NODES[0], {"stage": 2}, id="another stage"),
        pytest.param(NODES[0], {"position": 3}, id="in the prompt"),
        pytest.param(NODES[0], {"prefill_left": 1}, id="a chunk"),
        pytest.param(NODES[0], {"step": "embed"}, id="a token where rows are due"),
    ],
)
def test_what_no_seat_allows_is_the_daemons_to_judge(
    strangers: MakeStranger, last: Worker, peer: str, changed: dict[str, object]
) -> None:
    stranger = strangers(peer)
    sent = encode_job(job(**changed), ROW)
    stranger.send(*sent)
    message, payload = last.receive_any()
    assert isinstance(message, ipc.Arrived)
    assert message.sender == peer
    (frame,) = FrameDecoder().feed(payload)
    assert (frame.header, bytes(frame.payload)) == (sent[0], bytes(sent[1]))


def test_a_damaged_job_is_the_daemons_to_report(strangers: MakeStranger, last: Worker) -> None:
    stranger = strangers()
    header, payload = encode_job(job(), ROW)
    stranger.send(header, bytes(payload[:-1]) + b"\x01")
    assert isinstance(last.receive_any().message, ipc.Arrived)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"", "bad_tensor"),
        (b"".join(encode_tensor(np.zeros((1, 8), np.float32))), "bad_tensor"),
        (b"".join(encode_tensor(np.full((1, 256), np.nan, np.float32))), "bad_tensor"),
        (b"".join(encode_tensor(np.zeros((2, 256), np.float32))), "bad_tensor"),
        (b"".join(encode_tensor(np.zeros(1, np.int32))), "bad_tensor"),
        (ROW, "position_gap"),
    ],
)
def test_rows_that_cannot_be_run_fail_their_request_and_not_the_worker(
    strangers: MakeStranger, last: Worker, payload: bytes, kind: str
) -> None:
    stranger = strangers()
    stranger.send(*encode_job(job(), payload))
    while isinstance(answer := last.receive_any().message, ipc.Turned):
        assert answer.running
    if kind == "bad_tensor":
        # The daemon refuses it as it refuses what comes to itself, and blames the sender.
        assert answer == ipc.Arrived(sender=NODES[0])
        assert isinstance(last.call(ipc.CloseLinks, peer=NODES[0]).message, ipc.Done)
        return
    assert isinstance(answer, ipc.Error)
    assert (answer.kind, answer.request_id, answer.id, answer.fatal) == (kind, "r", 0, False)
    assert isinstance(last.call(ipc.CloseLinks, peer=NODES[0]).message, ipc.Done)


def test_nonsense_ends_the_link_and_not_the_worker(strangers: MakeStranger, last: Worker) -> None:
    stranger = strangers()
    stranger.send(b"nonsense", b"")
    lost = last.receive_any().message
    assert isinstance(lost, ipc.LinkLost)
    assert (lost.peer, lost.direction) == (NODES[0], "receiving")
    assert "protocol" in lost.reason


def test_the_daemon_hears_that_a_job_runs_before_it_is_done_and_when_it_is_gone() -> None:
    """It waits for such a job longer than for one that was lost on its way."""
    said: list[ipc.Turned] = []
    ring = Ring(said.append, Jobs(), lambda *_: None)
    take = ipc.TakeSeat(
        id=1,
        request_id="r",
        stage=1,
        start=SPLIT,
        end=12,
        before=A,
        after=B,
        origin=A,
        n_prompt_tokens=4,
    )
    ring.take_seat(take)
    (seat,) = ring._seats.values()
    ring.send_reports()
    assert said == []
    assert seat.enter(0)
    ring.send_reports()
    assert [(turned.running, turned.n_jobs) for turned in said] == [(True, 0)]
    ring.send_reports()
    assert len(said) == 1
    seat.exit()
    seat.reported_at = 0.0
    ring.send_reports()
    assert [(turned.running, turned.n_jobs) for turned in said] == [(True, 0), (False, 0)]


def test_a_link_without_its_socket_is_refused(last: Worker) -> None:
    assert last.refused(ipc.TakeLink, SECRET, peer=C, direction="sending").kind == "bad_message"


@pytest.mark.parametrize(("end", "sampling"), [(12, None), (8, GREEDY), (13, GREEDY)])
def test_a_seat_that_contradicts_itself_is_refused(
    last: Worker, end: int, sampling: ipc.Sampling | None
) -> None:
    refusal = last.refused(
        ipc.TakeSeat,
        request_id="r",
        stage=1,
        start=SPLIT,
        end=end,
        before=B,
        after=A,
        origin=C,
        n_prompt_tokens=1,
        sampling=sampling,
    )
    assert refusal.field in ("sampling", "end")
