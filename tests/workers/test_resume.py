"""A request that began elsewhere goes on here: with the next token, the same text, and no token twice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.errors import CallError

from . import waiting
from .client import Generated, Worker
from .conftest import MakeModel, StartWorker
from .factory import N_VOCAB
from .test_exactness import GUIDE

N_TOKENS = 40
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, max_tokens=N_TOKENS),
    "seeded": Sampling(seed=7, max_tokens=N_TOKENS),
    "truncated": Sampling(seed=7, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, max_tokens=N_TOKENS),
    "penalties": Sampling(
        seed=7, repeat_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4, max_tokens=N_TOKENS
    ),
    "dry": Sampling(seed=7, dry_multiplier=0.8, temperature=0.2, max_tokens=N_TOKENS),
    "grammar": Sampling(seed=7, grammar='root ::= ("a" | "bc" | "d"){30} "."', max_tokens=N_TOKENS),
    "schema": Sampling(seed=7, json_schema=json.dumps({"enum": ["some", "somewhat"]}), max_tokens=N_TOKENS),
    "stop": Sampling(seed=7, stop=("ab", "zz", "e"), max_tokens=N_TOKENS),
}


def logits(index: int) -> np.ndarray:
    return np.random.default_rng(index).standard_normal(N_VOCAB).astype(np.float32) * 2


def decode(decoding: Decoding) -> tuple[list[int], list[bytes], str | None]:
    """Tokens, texts and the end of a decoding whose logits depend on the index only."""
    tokens, texts, finish = [], [], None
    while finish is None:
        decoded = waiting.decode(decoding, logits(decoding.n_generated), decoding.n_generated)
        tokens.append(decoded.token)
        texts.append(decoded.text)
        finish = decoded.finish_reason
    return tokens, texts, finish


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_sampler_goes_on_from_any_token_as_if_it_had_drawn_those_before(
    vocabulary: Vocabulary, name: str
) -> None:
    sampling = SAMPLINGS[name]
    tokens, texts, finish = decode(Decoding(vocabulary, sampling))
    assert len(tokens) > 2
    for n in range(len(tokens)):
        resumed = Decoding(vocabulary, sampling)
        resumed.resume(tokens[:n])
        assert decode(resumed) == (tokens[n:], texts[n:], finish)


def test_mirostat_goes_on_with_its_first_limit(vocabulary: Vocabulary) -> None:
    sampling = Sampling(seed=7, mirostat=2, max_tokens=N_TOKENS)
    tokens, _, _ = decode(Decoding(vocabulary, sampling))
    resumed = Decoding(vocabulary, sampling)
    resumed.resume(tokens[:10])
    assert len(decode(resumed)[0]) == N_TOKENS - 10


def test_tokens_that_cannot_have_been_sampled_are_refused(vocabulary: Vocabulary) -> None:
    """libllama would abort on them."""
    with pytest.raises(CallError, match="token ids lie in") as refusal:
        Decoding(vocabulary, SAMPLINGS["greedy"]).resume([N_VOCAB])
    assert (refusal.value.kind, refusal.value.field) == ("bad_message", "generated")
    tokens, _, _ = decode(Decoding(vocabulary, SAMPLINGS["grammar"]))
    wrong = next(token for token in range(N_VOCAB) if token not in tokens)
    resumed = Decoding(vocabulary, SAMPLINGS["grammar"])
    resumed.resume([*tokens[:3], wrong])
    with pytest.raises(CallError, match="token 3 is not allowed by the grammar"):
        decode(resumed)


def resume(worker: Worker, tokens: np.ndarray, n_generated: int, sampling: Sampling) -> Generated:
    """Also that indices go on where the first worker stopped."""
    worker.send(
        ipc.Generate,
        encode_tensor(tokens),
        request_id="resumed",
        sampling=sampling,
        n_generated=n_generated,
    )
    generated: list[int] = []
    text = b""
    while not isinstance((answer := worker.receive_any()).message, ipc.GenerateDone):
        assert isinstance(answer.message, ipc.Token), answer.message
        assert answer.message.index == n_generated + len(generated)
        generated.append(answer.message.token)
        text += bytes(answer.payload)
    return Generated(generated, text, answer.message)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_goes_on_in_another_worker(start_worker: StartWorker, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True, repeat_penalty=1.1)
    first, second = start_worker(), start_worker()
    first.open(GUIDE, (0, 12))
    second.open(GUIDE, (0, 6), (6, 12))
    prompt = first.tokenize(messages=[{"role": "user", "content": "What is a pipeline?"}])
    whole = first.generate(prompt, sampling=sampling)
    for n in (1, 11, 23):
        so_far = np.concatenate((prompt, np.array(whole.tokens[:n], np.int32)))
        rest = resume(second, so_far, n, sampling)
        assert rest.tokens == whole.tokens[n:]
        assert whole.text.endswith(rest.text)
        assert (rest.done.n_prompt_tokens, rest.done.n_generated) == (len(prompt), 24 - n)


@pytest.mark.slow
def test_the_last_stage_of_a_chain_goes_on(start_worker: StartWorker) -> None:
    sampling = Sampling(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, repeat_penalty=1.1)
    worker = start_worker()
    worker.open(GUIDE, (0, 6), (6, 12))
    prompt = worker.tokenize(messages=[{"role": "user", "content": "What is a pipeline?"}])
    whole = worker.generate(prompt, sampling=sampling)
    rows = np.concatenate((prompt, np.array(whole.tokens[:5], np.int32)))
    position, tokens, extra = 0, [], {"sampling": sampling, "generated": tuple(whole.tokens[:5])}
    while len(tokens) < 7:
        hidden = worker.hidden(rows, request_id="r", start=0, end=6, position=position)
        answer = worker.forward(
            hidden,
            request_id="r",
            start=6,
            end=12,
            position=position,
            want="token",
            n_prompt_tokens=len(prompt),
            **extra,
        )
        assert answer.message.index == 5 + len(tokens)
        tokens.append(answer.message.token)
        position, rows, extra = position + len(rows), np.array([answer.message.token], np.int32), {}
    assert tokens == whole.tokens[5:]


def test_more_generated_tokens_than_there_are_tokens_are_refused(
    worker: Worker, make_model: MakeModel
) -> None:
    path = make_model("llama")
    worker.open(path, (0, 1))
    error = worker.refused(
        ipc.Generate, encode_tensor(np.array([1, 2], np.int32)), request_id="r", n_generated=2
    )
    assert (error.kind, error.field) == ("bad_message", "n_generated")
