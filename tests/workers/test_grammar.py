"""Grammars, JSON schemas and DRY over a real vocabulary: 256 single bytes and a few special tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.decode.sampling import Sampler
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.errors import CallError

from .factory import N_VOCAB
from .waiting import decode

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def generate(vocabulary: Vocabulary, sampling: Sampling, *, seed: int = 0) -> tuple[str, str | None]:
    """Text from random logits, and why it ended."""
    rng = np.random.default_rng(seed)
    decoding = Decoding(vocabulary, sampling)
    text = b""
    for index in range(sampling.max_tokens):
        decoded = decode(decoding, rng.standard_normal(N_VOCAB).astype(np.float32) * 3, index)
        text += decoded.text
        if decoded.finish_reason is not None:
            break
    return text.decode(), decoded.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_logits_write_what_the_grammar_says(vocabulary: Vocabulary, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, grammar='root ::= ("yes" | "no") "!"{2}', seed=1)
    texts = {generate(vocabulary, sampling, seed=seed) for seed in range(12)}
    assert texts == {("yes!!", "stop"), ("no!!", "stop")}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_logits_write_json_of_the_schema(vocabulary: Vocabulary, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, json_schema=json.dumps(SCHEMA), seed=1, max_tokens=200)
    for seed in range(5):
        text, finish = generate(vocabulary, sampling, seed=seed)
        assert finish == "stop"
        value = json.loads(text)
        assert set(value) == {"name", "age"}
        assert value["name"] in ("ada", "bob")
        assert isinstance(value["age"], int)


def test_grammar_keeps_the_proportions_of_what_it_allows(vocabulary: Vocabulary) -> None:
    """Most of the probability lies on tokens that are not allowed: the second draw decides nearly always."""
    logits = np.zeros(N_VOCAB, np.float32)
    logits[ord("a")], logits[ord("b")] = np.log(3.0), 0.0
    sampling = Sampling(grammar='root ::= ("a" | "b")*', seed=4)
    logits[list(vocabulary.end_tokens)] = -np.inf
    decoding = Decoding(vocabulary, sampling)
    drawn = [decode(decoding, logits, index).token for index in range(250)]
    assert set(drawn) == {ord("a"), ord("b")}
    assert abs(drawn.count(ord("a")) / len(drawn) - 0.75) < 0.14  # five standard deviations


def test_step_in_a_grammar_can_be_repeated(vocabulary: Vocabulary) -> None:
    decoding = Decoding(vocabulary, Sampling(temperature=0.0, grammar='root ::= "abcdef"'))
    logits = np.zeros(N_VOCAB, np.float32)
    tokens = [decode(decoding, logits, index).token for index in range(5)]
    assert bytes(tokens) == b"abcde"
    assert [decode(decoding, logits, index).token for index in range(2, 5)] == tokens[2:]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(grammar="root ::= nothing"), "sampling.grammar"),
        (Sampling(grammar='other ::= "a"'), "sampling.grammar"),
        (Sampling(grammar='root ::= root "a"'), "sampling.grammar"),
        (Sampling(grammar="root ::= " + "(" * 20000 + '"a"' + ")" * 20000), "sampling.grammar"),
        (Sampling(grammar='root ::= "a"{100000}'), "sampling.grammar"),
        (Sampling(grammar='root ::= "a"\0'), "sampling.grammar"),
        (Sampling(grammar="root ::= [z-a]"), "sampling.grammar"),
        (Sampling(grammar="root ::= [^\\x7a-\\x61]"), "sampling.grammar"),
        (Sampling(json_schema="{"), "sampling.json_schema"),
        (Sampling(json_schema='{"$ref": "https://example.org/schema"}'), "sampling.json_schema"),
        (Sampling(json_schema='{"$ref": "#/nowhere"}'), "sampling.json_schema"),
        (Sampling(json_schema='{"type": "dance"}'), "sampling.json_schema"),
        (Sampling(json_schema='{"not":' * 500 + "{}" + "}" * 500), "sampling.json_schema"),
        (Sampling(json_schema='{"items":' * 5000 + "{}" + "}" * 5000), "sampling.json_schema"),
        (Sampling(grammar='root ::= "a"', json_schema="{}"), "sampling.grammar"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(
    vocabulary: Vocabulary, capfd: pytest.CaptureFixture[str], sampling: Sampling, field: str
) -> None:
    with pytest.raises(CallError) as caught:
        generate(vocabulary, sampling)
    assert (caught.value.kind, caught.value.field) == ("bad_message", field)
    assert capfd.readouterr().err == "", "libllama printed the grammar"


def test_dry_penalises_going_on_with_a_repeated_sequence(vocabulary: Vocabulary) -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    logits[ord("d")], logits[ord("x")] = 2.0, 1.0
    sampling = Sampling(temperature=0.0, dry_multiplier=2.0, dry_allowed_length=2)
    sampler = Sampler(sampling, vocabulary.handle, N_VOCAB)
    repeating = tuple(b"abcd.abc")
    assert sampler.sample(logits, len(repeating), repeating) == ord("x")
    assert sampler.sample(logits, 3, tuple(b"abc")) == ord("d")
