"""Measures how far a token lies from the one that the same seed gives another node. Pure.

Tokens are drawn by inversion: in some order of the tokens, the one at which the sum of probabilities reaches
a random number that is a function of the seed. Two nodes whose logits differ by rounding get the same token,
or two whose borders lie close together. The probability that lies between the two tokens is so small for an
honest node, and as large as chance has it for one that draws from other logits or with another number.

A node that has the layers itself knows all logits, and can tell how much probability lies between the number
and the token. Of another holder's result only the 20 likeliest tokens are known, so the value computed here
is at most the true one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from swarmllm.pipeline.check.fingerprints import LARGEST, OWN
from swarmllm.pipeline.check.verdict import Sampled
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

FAR: Final = 0.1
"""More probability than this between two tokens is far; for greedy ones, see FAR_NATS."""
IMPOSSIBLE: Final = 0.2
"""So much does not lie between two tokens that were drawn from nearly the same logits: honest nodes come to
0.03 (docs/security.md)."""
FAR_NATS: Final = 1.0
"""A greedy token that is so much less likely than the likeliest one is far."""
_UNSURE_NATS: Final = 1.0
"""By which the logarithm of a small probability may differ at an honest node."""
_F16: Final = 2.0**-10
"""Twice what f16 rounds, in parts of a value."""
_NEARLY_EQUAL_NATS: Final = 0.7
"""Tokens that are so nearly as likely as another one may have the other order at another node."""


def comparable(sampled: list[Sampled], reported: Sequence[int], sampling: Sampling) -> list[Sampled]:
    """Those of the tokens that were `sampled` again that follow the same ones as those that were told. A
    grammar allows other tokens after another one; whatever else looks back, hardly."""
    if not sampling.grammar and not sampling.json_schema:
        return sampled
    differs = (again.token != token for again, token in zip(sampled, reported, strict=False))
    return sampled[: next((index + 1 for index, is_other in enumerate(differs) if is_other), None)]


def is_plain(sampling: Sampling) -> bool:
    """Whether it draws from what the model's own probabilities say, by one random number."""
    return not (
        sampling.repeat_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.dry_multiplier
        or sampling.mirostat
        or sampling.grammar
        or sampling.json_schema
        or sampling.logit_bias
        or sampling.typical_p < 1
        or sampling.xtc_probability
    )


def with_apart(
    sampled: list[Sampled], reported: Sequence[int], sampling: Sampling, n_vocab: int
) -> list[Sampled]:
    """With what lies at least between the random number and each token that was told, where it was drawn and
    only that is known."""
    if sampling.temperature == 0 or not is_plain(sampling):
        return sampled
    return [
        again
        if again.apart is not None or not again.likeliest
        else replace(again, apart=between(token, again, sampling, n_vocab) if token != again.token else 0.0)
        for again, token in zip(sampled, reported, strict=False)
    ]


def distance_max(sampling: Sampling, at_most: float) -> float:
    """So much may lie between them, where it is `at_most` at a temperature of 0.5 and above: the lower the
    temperature, the more a little difference of the logits moves."""
    return at_most / min(1.0, 2 * sampling.temperature) if sampling.temperature else math.inf


def is_far(reported: int, again: Sampled, sampling: Sampling, n_vocab: int) -> bool:
    """`again`: sampled from the same rows, with the same seed. `sampling` is plain."""
    if reported == again.token or not again.likeliest:
        return False
    if sampling.temperature == 0:
        own = again.reported_logprob
        if own is None:
            own = dict(again.likeliest).get(reported, again.likeliest[-1][1])
        return own < again.likeliest[0][1] - FAR_NATS
    apart = between(reported, again, sampling, n_vocab) if again.apart is None else again.apart
    return apart > distance_max(sampling, FAR)


def between(reported: int, again: Sampled, sampling: Sampling, n_vocab: int) -> float:
    """At least so much probability lies between the two tokens."""
    temperature = sampling.temperature
    total = _total([logprob for _, logprob in again.likeliest], temperature, n_vocab)
    by_rank, by_id = 0.0, 0.0
    logprobs = dict(again.likeliest)
    least = again.likeliest[-1][1]
    ends = sorted((logprobs.get(reported, least), logprobs.get(again.token, least)))
    low, high = min(reported, again.token), max(reported, again.token)
    for token, logprob in again.likeliest:
        part = math.exp(logprob / temperature) / total
        if low < token < high:
            by_id += part
        if ends[0] + _NEARLY_EQUAL_NATS < logprob < ends[1] - _NEARLY_EQUAL_NATS:
            by_rank += part
    if sampling.top_k or sampling.top_p < 1:
        return by_rank  # libllama sorts them, the likeliest first.
    return min(by_id, by_rank) if sampling.min_p else by_id


def end_chance(reported: int, again: Sampled, sampling: Sampling, n_tokens: int) -> float:
    """At most so likely is it that an honest node's text ends with `reported`, which is not among the
    likeliest tokens, as one of the first `n_tokens`. `sampling` is plain."""
    if not again.likeliest or not sampling.temperature:
        return 1.0
    own = again.likeliest[-1][1] if again.reported_logprob is None else again.reported_logprob
    weights = (logprob / sampling.temperature for _, logprob in again.likeliest)
    unsure = _UNSURE_NATS / min(1.0, sampling.temperature)
    chance = own / sampling.temperature + unsure - math.log(math.fsum(map(math.exp, weights)) or 1.0)
    return math.exp(min(0.0, chance + math.log(n_tokens)))


def end_chance_by_fingerprint(values: Tensor, sampling: Sampling, n_tokens: int) -> float:
    """The same by the fingerprint that came with the token that ended the text, f32 [N_VALUES]: the likeliest
    token alone has so much more probability."""
    if not sampling.temperature:
        return 1.0
    largest, own = float(values[LARGEST]), float(values[OWN])
    unsure = _F16 * max(abs(largest), abs(own))
    return math.exp(min(0.0, (own - largest + unsure) / sampling.temperature + math.log(n_tokens)))


def _total(logprobs: Sequence[float], temperature: float, n_vocab: int) -> float:
    """The sum of the weights of all tokens, at most. `logprobs`: of the likeliest ones, in order."""
    known = sum(math.exp(logprob / temperature) for logprob in logprobs)
    rest = max(0.0, 1 - sum(map(math.exp, logprobs)))
    n_rest = max(1, n_vocab - len(logprobs))
    if temperature >= 1:  # most where the rest is spread evenly
        return known + n_rest * float((rest / n_rest) ** (1 / temperature))
    return known + rest * math.exp(logprobs[-1] * (1 / temperature - 1))  # all as likely as the last known
