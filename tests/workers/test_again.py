"""Tokens that were told are sampled again from their rows, many at a time, with what their logits show."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_again
from swarmllm_proto.fingerprints import (
    FINGERPRINT_BYTES,
    N_DRAWN,
    N_VALUES,
    check_fingerprint,
    decode_fingerprint,
    drawn_tokens,
    encode_fingerprint,
)
from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode import candidates
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.decode.vocabulary import Vocabulary

from .factory import N_VOCAB
from .test_batching import Room, batches, open_room  # noqa: F401
from .test_resume import logits

OpenRoom = Callable[..., Room]
PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)
N_TOKENS = 40
KEY = 2**32 - 1
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(seed=7),
    "cool": Sampling(seed=7, temperature=0.3),
    "truncated": Sampling(seed=7, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": Sampling(seed=7, repeat_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4),
    "schema": Sampling(seed=7, json_schema=json.dumps({"enum": ["some", "somewhat"]})),
}


def asked(name: str) -> Sampling:
    is_free = name != "schema"
    return msgspec.structs.replace(
        SAMPLINGS[name], max_tokens=N_TOKENS, ignore_eos=is_free, fingerprint_key=KEY, top_logprobs=3
    )


def told_by(room: Room, sampling: Sampling) -> list[ipc.Token]:
    room.generate(PROMPT, "told", sampling)
    while room.handlers.state.has_work:
        room.run()
    return [message for message, _ in room.sent if isinstance(message, ipc.Token)]


def sampled_again(
    room: Room, tokens: list[int], sampling: Sampling, n_before: int = 0, **changed: Any
) -> list[ipc.TokenAgain]:
    """`tokens`: all that were told, of which those after `n_before` are sampled again."""
    data = np.array([*PROMPT, *tokens], np.int32)[:-1]
    first = len(PROMPT) + n_before - 1
    fields: dict[str, Any] = {"start": 0, "end": 4, "request_id": "again", "n_prompt_tokens": len(PROMPT)}
    if first:
        room.call(ipc.Forward, data[:first], position=0, want="none", **fields)
        room.run()
    n_sent = len(room.sent)
    about = {"generated": tuple(tokens[:n_before]), "scored": tuple(tokens[n_before:]), "sampling": sampling}
    room.call(ipc.Forward, data[first:], position=first, want="again", **(fields | about | changed))
    while room.handlers.state.has_work:
        room.run()
    assert room.errors() == {}
    room.call(ipc.CancelRequest, request_id="again")
    ((_, payload),) = [each for each in room.sent[n_sent:] if isinstance(each[0], ipc.LayerResult)]
    return list(decode_again(payload, len(data) - first))


@pytest.mark.parametrize("n_before", [0, 11])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_a_worker_told_it_samples_again_in_few_batches(
    open_room: OpenRoom,  # noqa: F811
    batches: list[list[int]],  # noqa: F811
    name: str,
    n_before: int,
) -> None:
    room, sampling = open_room("llama", (0, 4), n_ctx=256), asked(name)
    told = told_by(room, sampling)
    n_before = min(n_before, len(told) - 1)
    batches.clear()
    again = sampled_again(room, [each.token for each in told], sampling, n_before)
    assert len(batches) <= 1 + len(again) / 8 + 1
    # Batches of many rows round otherwise than single ones.
    assert sum(one.token != other.token for one, other in zip(again, told[n_before:], strict=True)) <= 4
    assert again[-1].ends is (told[-1].finish_reason == "stop")
    for one, other in zip(again, told[n_before:], strict=True):
        assert one.logprobs[0].token == other.token
        assert len(one.logprobs) == 4
        fingerprints = decode_fingerprint(one.fingerprint), decode_fingerprint(other.fingerprint or b"")
        np.testing.assert_allclose(*fingerprints, atol=0.05)
        if name in ("plain", "cool"):
            assert one.apart is not None
            assert one.apart < (1e-6 if one.token == other.token else 0.01)
        else:
            assert one.apart is None


def test_a_token_that_differs_is_followed_all_the_same(open_room: OpenRoom) -> None:  # noqa: F811
    room, sampling = open_room("llama", (0, 4), n_ctx=256), asked("plain")
    tokens = [each.token for each in told_by(room, sampling)]
    tokens[20] = (tokens[20] + 1) % N_VOCAB
    again = sampled_again(room, tokens, sampling)
    differing = [at for at, (one, told) in enumerate(zip(again, tokens, strict=True)) if one.token != told]
    assert differing[0] == 20
    assert again[20].logprobs[0].token == tokens[20]
    assert again[20].apart is not None
    assert 0 < again[20].apart < 1
    # Of the token that was told, not of the one that it samples.
    own = decode_fingerprint(again[20].fingerprint)[N_DRAWN + 1]
    logprobs = {each.token: each.logprob for each in again[20].logprobs}
    top = max(logprobs.values())
    largest = decode_fingerprint(again[20].fingerprint)[N_DRAWN]
    assert own - largest == pytest.approx(logprobs[tokens[20]] - top, abs=0.02)


def test_where_a_grammar_says_what_may_follow_nothing_is_said_behind_a_token_that_differs(
    open_room: OpenRoom,  # noqa: F811
) -> None:
    room, sampling = open_room("llama", (0, 4), n_ctx=256), asked("schema")
    tokens = [each.token for each in told_by(room, sampling)]
    tokens[2] = (tokens[2] + 1) % N_VOCAB
    assert len(sampled_again(room, tokens, sampling)) == 3


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"scored": (1, 2)}, "scored"),
        ({"scored": (*range(1, 10), N_VOCAB)}, "scored"),
        ({"generated": (1,)}, "generated"),
        ({"sampling": None}, "sampling"),
        ({"end": 2}, "want"),
    ],
)
def test_what_does_not_fit_is_refused(
    open_room: OpenRoom,  # noqa: F811
    changed: dict[str, object],
    field: str,
) -> None:
    room = open_room("llama", (0, 4), n_ctx=256)
    fields = {
        "request_id": "r",
        "start": 0,
        "end": 4,
        "position": 0,
        "want": "again",
        "n_prompt_tokens": 1,
        "sampling": asked("plain"),
        "scored": tuple(range(1, 11)),
    }
    room.call(ipc.Forward, np.arange(10, dtype=np.int32), **(fields | changed))
    room.run()
    ((error, _),) = [each for each in room.sent if isinstance(each[0], ipc.Error)]
    assert (error.kind, error.field) == ("bad_message", field)


def test_a_fingerprint_is_of_the_logits_before_anything_changes_them(vocabulary: Vocabulary) -> None:
    sampling = msgspec.structs.replace(asked("penalties"), logit_bias=((5, 9.0),))
    decoding = Decoding(vocabulary, sampling)
    for index in range(70):
        row = logits(index)
        decoded = decoding.decode(row, index)
        drawn = row[drawn_tokens(KEY, index, N_VOCAB)]
        assert decoded.fingerprint == encode_fingerprint(drawn, row.max(), row[decoded.token])
    assert Decoding(vocabulary, Sampling(seed=7)).decode(logits(0), 0).fingerprint == b""


def test_drawn_tokens_are_others_for_each_index_and_key() -> None:
    drawn = [tuple(drawn_tokens(key, index, 50_000)) for key in (0, 1) for index in (0, 1, 31, 32, 33, 64)]
    assert len(set(drawn)) == len(drawn)
    assert all(len(each) == N_DRAWN and max(each) < 50_000 for each in drawn)
    assert {token for index in range(100) for token in drawn_tokens(3, index, 20)} == set(range(20))


def test_a_fingerprint_is_finite_and_as_long_as_it_should_be() -> None:
    drawn = np.linspace(-3e38, 3e38, N_DRAWN).astype(np.float32)
    values = decode_fingerprint(encode_fingerprint(drawn, float("inf"), float("-inf")))
    assert values.max() == 65504
    assert values.min() == -65504
    zeros = np.zeros(N_DRAWN, np.float32)
    assert decode_fingerprint(encode_fingerprint(zeros, float("inf"), 0.0)).max() == 65504
    for data in (b"", bytes(35), bytes(37), b"\x00\x7c" * 18, b"\x00\x7e" * 18):
        with pytest.raises(ValueError, match=r"bytes|numbers"):
            decode_fingerprint(data)


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=N_VALUES, max_size=N_VALUES))
def test_logits_are_rounded_as_numpy_rounds_them(values: list[float]) -> None:
    """Nodes of earlier versions round with numpy."""
    expected = np.array(values, np.float32).astype("<f2")
    assert encode_fingerprint(np.array(values[:N_DRAWN], np.float32), *values[N_DRAWN:]) == expected.tobytes()


@given(st.binary(min_size=FINGERPRINT_BYTES, max_size=FINGERPRINT_BYTES))
def test_what_is_a_number_is_what_numpy_says(data: bytes) -> None:
    try:
        check_fingerprint(data)
    except ValueError:
        assert not np.isfinite(np.frombuffer(data, "<f2")).all()
    else:
        assert np.isfinite(np.frombuffer(data, "<f2")).all()


def test_nothing_lies_between_a_random_number_and_the_token_that_it_draws() -> None:
    generator = np.random.default_rng(4)
    for _ in range(300):
        row = (3 * generator.standard_normal(500)).astype(np.float32)
        temperature, random = float(generator.uniform(0.2, 2)), float(generator.random())
        token = candidates.draw(row, float(row.max()), temperature, random)
        assert token is not None
        assert candidates.apart(row, temperature, random, token) < 1e-6
        weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
        ends = np.cumsum(weights) / weights.sum()
        for other in (0, 250, 499):
            starts = ends[other] - weights[other] / weights.sum()
            expected = max(starts - random, random - ends[other], 0)
            assert candidates.apart(row, temperature, random, other) == pytest.approx(expected, abs=1e-6)
