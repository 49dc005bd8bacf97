"""Log-probabilities: the values, and that they are the model's own whatever the sampler does."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_proto.ipc.base import LOGPROB_MIN
from swarmllm_workers.decode.sampling import logprobs
from swarmllm_workers.engine.segment import Span

from .test_batching import PROMPT, Room, open_room  # noqa: F401
from .test_sampling import softmax

OpenRoom = Callable[..., Room]


def piece(token: int) -> bytes:
    return b"%d" % token


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=60), st.integers(0, 20), st.data())
def test_values_and_order_are_those_of_a_full_sort(
    values: list[int], n_top: int, data: st.DataObject
) -> None:
    logits = (np.array(values) / 4).astype(np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    chosen, *top = logprobs(logits, token, n_top, piece)
    expected = np.log(softmax(logits))
    assert [each.token for each in top] == np.argsort(-logits, kind="stable")[:n_top].tolist()
    assert (chosen.token, chosen.piece) == (token, piece(token))
    np.testing.assert_allclose(
        [each.logprob for each in (chosen, *top)],
        [expected[each.token] for each in (chosen, *top)],
        atol=1e-5,
    )


def test_the_impossible_has_a_number_and_the_certain_is_not_above_zero() -> None:
    logits = np.array([-np.inf, 3.0, -np.inf], np.float32)
    impossible, certain, *_ = logprobs(logits, 0, 3, piece)
    assert (impossible.logprob, certain.logprob) == (LOGPROB_MIN, 0.0)
    assert len(logprobs(logits, 1, 0, lambda token: b"x" * 5000)[0].piece) == 1024


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"temperature": 3.0, "top_k": 50, "seed": 4},
        {"logit_bias": ((7, 100.0),), "seed": 4},
        {"grammar": 'root ::= "zzzz"'},
    ],
    ids=lambda changed: next(iter(changed), "plain"),
)
def test_a_worker_tells_the_models_own_distribution(open_room: OpenRoom, changed: dict[str, object]) -> None:  # noqa: F811
    """The first token's, against the logits of another engine; the chosen one may be anywhere in it."""
    room, plain = (open_room("llama", (0, 4), n_ctx=256) for _ in range(2))
    sampling = ipc.Sampling(temperature=0.0, max_tokens=2, logprobs=True, top_logprobs=5)
    for name, value in changed.items():
        sampling = msgspec.structs.replace(sampling, **{name: value})
    room.generate(PROMPT, "r", sampling)
    room.run()
    first, second = (m for m, _ in room.sent if isinstance(m, ipc.Token))
    engine = plain.handlers.state.engine()
    route, slot = engine.route("r", 0, 4), engine.take_slot("r")
    (logits,) = engine.run(route, [Span(slot, 0, PROMPT, "logits")])
    expected = np.log(softmax(logits))
    chosen, *top = first.logprobs
    assert chosen.token == first.token
    assert [each.token for each in top] == np.argsort(-logits, kind="stable")[:5].tolist()
    for each in (chosen, *top):
        assert each.logprob == pytest.approx(expected[each.token], abs=1e-4)
        assert each.piece == engine.vocabulary.full_piece(each.token)
    assert len(second.logprobs) == 6


def test_nothing_is_told_unasked(open_room: OpenRoom) -> None:  # noqa: F811
    room = open_room("llama", (0, 4), n_ctx=256)
    room.generate(PROMPT, "r")
    room.run()
    assert all(m.logprobs == () for m, _ in room.sent if isinstance(m, ipc.Token))
