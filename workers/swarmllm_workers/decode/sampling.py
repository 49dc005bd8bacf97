"""Choose the next token from the head's logits, with libllama's samplers among the tokens that can be drawn
(`candidates.py`).

Greedy is `argmax`, first of equals, as libllama's greedy sampler. Sampling is a function of (logits, seed,
index, tokens generated so far) and, with mirostat, of how surprising those were; the random numbers for token
i come from a generator seeded with (seed, i), so a step that is repeated after a failure, here or on another
node, draws the same token.

Penalties and DRY count generated tokens only, as OpenAI defines them; the head of a pipeline does not know
the prompt.

A grammar is asked about the token that was drawn without it, and only if it says no is another one drawn
among those that it allows: the same distribution for the price of one token in the usual case, as asking
about the whole vocabulary takes longer than a decode step.

Mirostat 1 and 2 (https://arxiv.org/abs/2007.14966) are after libllama's, which keep their state to
themselves; here the state before every token is kept, so that a step can be repeated.

`logprobs` tells how likely the chosen token was, and which others were likely. The distribution is the
model's own, softmax(logits), as in OpenAI's API and by default in llama.cpp's server (`post_sampling_probs:
false`): temperature, penalties, biases, grammars and truncation change what is drawn, not what is told here.
A token that was forced by them may so have a very low value.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_proto.ipc import Sampling, TokenLogprob
from swarmllm_proto.ipc.base import LOGPROB_MIN
from swarmllm_workers.decode import candidates
from swarmllm_workers.decode.grammar import Grammar
from swarmllm_workers.decode.native_draw import Changed, NativeDraw
from swarmllm_workers.errors import CallError
from swarmllm_workers.grammars.gbnf_matcher import CANDIDATE

N_ESTIMATE: Final = 100
"""Likeliest tokens from which version 1 estimates how fast probabilities fall; libllama's default."""


class Mirostat:
    def __init__(self, version: int, tau: float, eta: float) -> None:
        self._version = version
        self._tau, self._eta = tau, eta
        self._limits = [2.0 * tau]
        """The greatest surprise allowed for each token, bits."""

    def resume(self, n_generated: int) -> None:
        """Continue with the draw of token `n_generated`, with the initial limit."""
        self._limits = [2.0 * self._tau] * (n_generated + 1)

    def draw(self, logits: np.ndarray, index: int, seed: int) -> int:
        """Token `index`, after tokens 0 to index - 1 have been drawn. `logits` f32 [n], in the order of
        token ids; minus infinity for those that cannot come."""
        del self._limits[index + 1 :]
        limit = self._limits[index]
        order = np.argsort(-logits, kind="stable")
        weights = np.exp(logits[order].astype(np.float64) - float(logits[order[0]]))
        likely = weights / weights.sum()
        kept = likely[: self._n_kept(likely, limit)]
        kept = kept / kept.sum()
        random = np.random.default_rng(seed).random()
        chosen = min(int(np.searchsorted(np.cumsum(kept), random, side="right")), len(kept) - 1)
        surprise = -float(np.log2(kept[chosen]))
        self._limits.append(limit - self._eta * (surprise - self._tau))
        return int(order[chosen])

    def _n_kept(self, likely: np.ndarray, limit: float) -> int:
        """How many of the tokens, likeliest first; at least one."""
        n_possible = int(np.count_nonzero(likely))
        if self._version == 2:
            return min(max(int(np.count_nonzero(likely >= 2.0**-limit)), 1), n_possible)
        head = likely[: min(N_ESTIMATE, n_possible)]
        if len(head) < 2:
            return 1
        ranks = np.arange(len(head) - 1)
        steps = np.log((ranks + 2) / (ranks + 1))
        slope = float((steps * np.log(head[:-1] / head[1:])).sum() / (steps**2).sum())
        excess = slope - 1.0
        if abs(excess) < 1e-6 or slope <= 0:  # the formula has no value there
            return n_possible
        try:
            count = (excess * 2.0**limit / (1 - float(len(likely)) ** -excess)) ** (1 / slope)
        except ArithmeticError:  # more than a number can say
            return n_possible
        return min(max(int(count), 1), n_possible) if np.isfinite(count) else n_possible


PIECE_MAX: Final = 1024
"""Bytes of a token's text that are told; the wire's limit."""


def logprobs(
    logits: np.ndarray, token: int, n_top: int, piece: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """`token`, then the `n_top` likeliest, the first of equals first. `logits` f32 [n_vocab]."""
    best = float(logits.max())
    log_total = best + float(np.log(np.exp(logits - np.float32(best)).sum(dtype=np.float64)))
    n_top = min(n_top, len(logits))
    top: list[int] = []
    if n_top:
        largest = candidates.largest(logits, n_top, candidates.block_maxima(logits))
        top = candidates.descending(logits, largest)[:n_top].tolist()
    return tuple(
        TokenLogprob(each, _bounded(float(logits[each]) - log_total), piece(each)[:PIECE_MAX])
        for each in (token, *top)
    )


def _bounded(value: float) -> float:
    return min(max(value, LOGPROB_MIN), 0.0)


DRY_WINDOW: Final = 1024
"""Generated tokens that DRY looks back over."""
DRY_BREAKERS: Final = (b"\n", b":", b'"', b"*")
"""libllama's: a repeated sequence does not reach over these."""

_MIN_P_SLACK: Final = 1e-3
"""Tokens so little below what min_p keeps are left for libllama to decide about."""

_U32: Final = 2**32
REPEAT_PENALTY_MIN: Final = 0.01
"""With less, logits are soon no numbers any more."""


class Sampler:
    """One request's sampler. Raises CallError bad_message for what no sampler can do."""

    def __init__(
        self, sampling: Sampling, vocabulary: Any = None, n_vocab: int = 0, grammar: Grammar | None = None
    ) -> None:
        """`vocabulary`: libllama's; DRY and biases need it."""
        if sampling.repeat_penalty < REPEAT_PENALTY_MIN:
            limit = f"must be at least {REPEAT_PENALTY_MIN} (1 penalises nothing)"
            raise CallError("bad_message", limit, "sampling.repeat_penalty")
        if any(token >= n_vocab for token, _ in sampling.logit_bias):
            raise CallError("bad_message", f"token ids lie in [0, {n_vocab})", "sampling.logit_bias")
        self._sampling = sampling
        self._vocabulary = vocabulary
        self.seed = secrets.randbelow(_U32) if sampling.seed is None else sampling.seed
        self._penalises = sampling.repeat_last_n > 0 and (
            sampling.repeat_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        self._is_plain = not (self._penalises or sampling.dry_multiplier or sampling.logit_bias)
        self._biases = _summed(sampling.logit_bias)
        self._has_penalties_alone = (
            self._penalises and not sampling.logit_bias and not sampling.dry_multiplier
        )
        self._mirostat = (
            Mirostat(sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta)
            if sampling.mirostat and sampling.temperature > 0
            else None
        )
        self._grammar = grammar
        self._native = NativeDraw(sampling)
        self._uniform = candidates.SeededUniform()
        self._adjusted: np.ndarray | None = None
        self.largest = 0.0
        """Of the logits that were sampled from last, before anything changed them."""

    def resume(self, generated: Sequence[int]) -> None:
        """Continue after tokens that another process sampled with the same seed. Mirostat starts with its
        initial limit, because that limit depends on logits that were not kept."""
        if self._mirostat is not None:
            self._mirostat.resume(len(generated))

    def sample(self, logits: np.ndarray, index: int, generated: Sequence[int]) -> int:
        """A token id for generated token `index`. `logits` f32 [n_vocab]. Raises CallError engine on NaN,
        bad_message where `generated` does not follow the grammar or no token can go on in it, and
        GrammarPending."""
        if self._grammar is not None:
            self._grammar.look_ahead(generated)
        token = self._draw_quickly(logits, index, generated)
        if token is None:
            maxima = candidates.block_maxima(logits)
            self.largest = float(maxima.max())
            if not math.isfinite(self.largest):
                raise CallError("engine", "the logits are not finite: the model or its input is damaged")
            token = self._draw(logits, index, generated, maxima)
        if self._grammar is None or self._grammar.allows(token, generated):
            return token
        allowed = self._grammar.mask(logits, generated)
        maxima = candidates.block_maxima(allowed)
        if not np.isfinite(maxima.max()):
            raise CallError("bad_message", "no token of this model can go on in the grammar", "sampling")
        return self._draw(allowed, index, generated, maxima, again=True)

    def _draw_quickly(self, logits: np.ndarray, index: int, generated: Sequence[int]) -> int | None:
        """What `_draw` returns, in less time. None where it has to be asked."""
        changed = None if self._is_plain else self._changed(logits, generated)
        token = self._native(logits, step_seed(self.seed, index), changed)
        if token is not None:
            self.largest = self._native.largest
        return token

    def apart(self, logits: np.ndarray, index: int, token: int) -> float | None:
        """The probability between the random number of this step and `token`, in [0, 1]: 0 for the token that
        `sample` returns. None if more than temperature and seed decides."""
        sampling = self._sampling
        if (
            not self._is_plain
            or self._grammar is not None
            or self._mirostat is not None
            or sampling.temperature == 0.0
            or sampling.top_k > 0
            or sampling.top_p < 1.0
            or sampling.min_p > 0.0
            or sampling.typical_p < 1.0
            or sampling.xtc_probability
        ):
            return None
        random = self._uniform(step_seed(self.seed, index))
        return candidates.apart(logits, sampling.temperature, random, token)

    def _draw(
        self,
        logits: np.ndarray,
        index: int,
        generated: Sequence[int],
        maxima: np.ndarray,
        *,
        again: bool = False,
    ) -> int:
        """`maxima`: of the blocks of `logits`, as candidates.py has them."""
        # A second draw with the random number that led to a refusal would not be random any more.
        seed = step_seed(self.seed ^ (_U32 - 1 if again else 0), index)
        if not self._is_plain:
            logits = self._with_changes(logits, self._changed(logits, generated))
            maxima = candidates.block_maxima(logits)
        if self._is_greedy(maxima.max()):
            return candidates.best(logits, maxima)
        if self._mirostat is not None:
            return self._mirostat.draw(logits / np.float32(self._sampling.temperature), index, seed)
        return self._draw_adjusted(logits, maxima, seed)

    def _is_greedy(self, largest: np.float32) -> bool:
        """Also where the temperature is so small that nothing is left of the logits as numbers."""
        with np.errstate(all="ignore"):
            scaled = largest / np.float32(self._sampling.temperature)
        return self._sampling.temperature == 0.0 or not np.isfinite(scaled)

    def _draw_adjusted(self, logits: np.ndarray, maxima: np.ndarray, seed: int) -> int:
        sampling = self._sampling
        if sampling.top_k > 0:
            return self._choose(logits, candidates.largest(logits, sampling.top_k, maxima), seed)
        if sampling.typical_p < 1.0:  # needs the entropy of all
            return self._choose(logits, np.arange(len(logits)), seed)
        if sampling.top_p < 1.0:
            kept = candidates.nucleus(logits, sampling.top_p, maxima)
            return self._choose(logits, kept, seed, is_nucleus=True)
        if sampling.min_p > 0.0:
            threshold = float(maxima.max()) + math.log(sampling.min_p) - _MIN_P_SLACK
            return self._choose(logits, candidates.above(logits, threshold, maxima), seed)
        token = None
        if not sampling.xtc_probability:
            best = float(maxima.max())
            token = candidates.draw(logits, best, sampling.temperature, self._uniform(seed))
        return self._choose(logits, np.arange(len(logits)), seed) if token is None else token

    def _choose(self, logits: np.ndarray, ids: np.ndarray, seed: int, *, is_nucleus: bool = False) -> int:
        """Of `ids` the one that libllama's samplers choose. `is_nucleus`: `ids` are what is left after
        top_p, likeliest first."""
        if (
            self._sampling.xtc_probability
        ):  # of tokens that are likely enough, which 0 may be, it leaves the last
            ids = ids[logits[ids] > -np.inf]
        chain = self._chain(seed, is_nucleus=is_nucleus)
        try:
            chosen = _apply(chain, ids, logits[ids], is_sorted=is_nucleus)[1]
        finally:
            lib.llama_sampler_free(chain)
        if chosen < 0:
            raise CallError("engine", "the sampler selected nothing")
        return chosen

    def _chain(self, seed: int, *, is_nucleus: bool) -> Any:
        sampling = self._sampling
        samplers = []
        if sampling.top_k > 0:
            samplers.append(lib.llama_sampler_init_top_k(sampling.top_k))
        if sampling.typical_p < 1.0:
            samplers.append(lib.llama_sampler_init_typical(sampling.typical_p, 1))
        if sampling.top_p < 1.0 and not is_nucleus:
            samplers.append(lib.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0.0:
            samplers.append(lib.llama_sampler_init_min_p(sampling.min_p, 1))
        if sampling.xtc_probability > 0.0:
            samplers.append(
                lib.llama_sampler_init_xtc(
                    sampling.xtc_probability, sampling.xtc_threshold, 1, step_seed(seed, 0)
                )
            )
        samplers.append(lib.llama_sampler_init_temp(sampling.temperature))
        samplers.append(lib.llama_sampler_init_dist(seed))
        return _chained(samplers)

    def _changed(self, logits: np.ndarray, generated: Sequence[int]) -> Changed:
        """By biases, penalties and DRY, before anything is cut off."""
        sampling, biases = self._sampling, self._biases
        if self._has_penalties_alone and generated:
            recent = np.array(generated[-sampling.repeat_last_n :], np.int32)
            tokens, counts = np.unique(recent, return_counts=True)
            return Changed(tokens, self._penalised(logits[tokens], counts))
        n_back = max(sampling.repeat_last_n * self._penalises, DRY_WINDOW * (sampling.dry_multiplier != 0.0))
        recent = np.array(generated[-n_back:] if n_back else (), np.int32)
        tokens = np.unique(np.concatenate((biases.tokens, recent)))
        values = logits[tokens]
        values[np.searchsorted(tokens, biases.tokens)] += biases.values
        if self._penalises and len(recent):
            repeated, counts = np.unique(recent[-sampling.repeat_last_n :], return_counts=True)
            at = np.searchsorted(tokens, repeated)
            values[at] = self._penalised(values[at], counts)
        if sampling.dry_multiplier and len(recent):
            within = recent[-DRY_WINDOW:]
            at = np.searchsorted(tokens, np.unique(within))
            values[at] = self._without_repetition(tokens[at], values[at], within)
        return Changed(tokens, values)

    def _with_changes(self, logits: np.ndarray, changed: Changed) -> np.ndarray:
        """An array that the next call overwrites."""
        if self._adjusted is None or len(self._adjusted) != len(logits):
            self._adjusted = np.empty(len(logits), np.float32)
        self._adjusted[:] = logits
        self._adjusted[changed.tokens] = changed.values
        return self._adjusted

    def _penalised(self, logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """`logits` f32 of tokens that were generated `counts` times."""
        sampling = self._sampling
        repeat = np.float32(sampling.repeat_penalty)
        scaled = np.where(logits <= 0, logits * repeat, logits / repeat)
        frequency = counts.astype(np.float32) * np.float32(sampling.frequency_penalty)
        return np.asarray(scaled - (frequency + np.float32(sampling.presence_penalty)))

    def _without_repetition(self, tokens: np.ndarray, logits: np.ndarray, recent: np.ndarray) -> np.ndarray:
        """`logits` of `tokens` after DRY, which changes those of tokens in `recent` alone."""
        sampling = self._sampling
        breakers = (ctypes.c_char_p * len(DRY_BREAKERS))(*DRY_BREAKERS)
        chain = _chained(
            [
                lib.llama_sampler_init_dry(
                    self._vocabulary,
                    sampling.dry_multiplier,
                    sampling.dry_base,
                    sampling.dry_allowed_length,
                    DRY_WINDOW,
                    breakers,
                    len(breakers),
                )
            ]
        )
        try:
            for token in recent.tolist():
                lib.llama_sampler_accept(chain, token)
            return _apply(chain, tokens, logits)[0]
        finally:
            lib.llama_sampler_free(chain)


def _summed(biases: Sequence[tuple[int, float]]) -> Changed:
    """What is added to the logits of tokens, each of which may have several biases."""
    of_tokens: dict[int, np.float32] = {}
    for token, bias in sorted(biases, key=lambda each: each[0]):
        of_tokens[token] = of_tokens.get(token, np.float32(0)) + np.float32(bias)
    return Changed(np.array(list(of_tokens), np.int32), np.array(list(of_tokens.values()), np.float32))


def _chained(samplers: Sequence[Any]) -> Any:
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers:
        lib.llama_sampler_chain_add(chain, sampler)
    return chain


def _apply(
    chain: Any, ids: np.ndarray, logits: np.ndarray, *, is_sorted: bool = False
) -> tuple[np.ndarray, int]:
    """The logits as the chain leaves them, and the token that it chose, -1 where it does not choose.
    `is_sorted`: the largest comes first."""
    table = np.empty(len(ids), CANDIDATE)
    table["id"], table["logit"], table["p"] = ids, logits, 0.0
    array = lib.llama_token_data_array(
        data=table.ctypes.data_as(lib.llama_token_data_p),
        size=len(table),
        selected=-1,
        sorted=is_sorted,
    )
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    chosen = int(array.data[array.selected].id) if 0 <= array.selected < array.size else -1
    return table["logit"], chosen


def step_seed(seed: int, index: int) -> int:
    """Distinct, well spread 32-bit seeds for the steps of a request (splitmix64)."""
    z = (seed * 0x1_0000_0001 + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % _U32
