"""Scores of a prompt's own tokens, as a worker gives them, and that it holds few logits at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_scores
from swarmllm_workers.engine.segment import Span

from .test_batching import Room, batches, open_room  # noqa: F401
from .test_sampling import softmax

OpenRoom = Callable[..., Room]
TOKENS = np.random.default_rng(5).integers(3, 200, 150).astype(np.int32)
SCORED = tuple(TOKENS[1:].tolist())
N_TOP = 3


def ask(room: Room, name: str, n_rows: int, **changed: object) -> None:
    terms: dict[str, object] = {
        "start": 0,
        "end": 4,
        "position": 0,
        "want": "scores",
        "sampling": ipc.Sampling(top_logprobs=N_TOP),
        "n_prompt_tokens": n_rows,
        "scored": SCORED[:n_rows],
    }
    room.call(ipc.Forward, TOKENS[:n_rows], request_id=name, **(terms | changed))


def test_scores_are_those_of_each_rows_logits_and_no_batch_has_more_rows_than_there_is_room_for(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
) -> None:
    room, plain = (open_room("llama", (0, 4), n_ctx=256, n_slots=2) for _ in range(2))
    n_rows = len(SCORED)
    ask(room, "r", n_rows)
    room.run()
    ((message, payload),) = [each for each in room.sent if isinstance(each[0], ipc.LayerResult)]
    assert message.compute_s > 0
    engine = plain.handlers.state.engine()
    route, slot = engine.route("r", 0, 4), engine.take_slot("r")
    n_max = route.segments[-1].n_outputs_max
    sizes = [sum(batch) for batch in batches]
    assert (sum(sizes), max(sizes)) == (n_rows, n_max)
    assert n_max < n_rows / 4
    told = decode_scores(payload, n_rows, N_TOP)
    for at in range(0, n_rows, n_max):
        (logits,) = engine.run(route, [Span(slot, at, TOKENS[at : min(at + n_max, n_rows)], "rows")])
        for row, each_logits, scored in zip(told[at:], logits, SCORED[at:], strict=False):
            expected = np.log(softmax(each_logits))
            chosen, *top = row
            assert (chosen.token, chosen.piece) == (scored, engine.vocabulary.full_piece(scored))
            likeliest = np.argsort(-expected, kind="stable")[:N_TOP].tolist()
            assert [each.token for each in top] == likeliest
            found = [each.logprob for each in row]
            assert found == pytest.approx(expected[[scored, *likeliest]].tolist(), abs=1e-4)


def test_scores_beside_a_generation_leave_its_answer_alone(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=512)
    sampling = ipc.Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    room.generate(TOKENS[:6], "alone", sampling)
    room.run()
    room.generate(TOKENS[:6], "beside", sampling)
    ask(room, "scored", 100)
    room.run()
    assert room.errors() == {}
    assert room.tokens("beside") == room.tokens("alone")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"scored": SCORED[:9]}, "scored"),
        ({"scored": ()}, "scored"),
        ({"scored": (10**6,) * 10}, "scored"),
        ({"want": "none"}, "scored"),
        ({"end": 2}, "want"),
    ],
    ids=["too few", "none", "no such token", "not asked for", "no head"],
)
def test_what_cannot_be_scored_is_refused(
    open_room: OpenRoom,  # noqa: F811
    changed: dict[str, object],
    field: str,
) -> None:
    room = open_room("llama", (0, 4), n_ctx=256)
    ask(room, "r", 10, **changed)
    room.run()
    (error,) = (message for message, _ in room.sent if isinstance(message, ipc.Error))
    assert (error.kind, error.field) == ("bad_message", field)
