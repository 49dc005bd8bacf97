"""Answers in the words of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarmllm.api.http.errors import error_object
from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import Json
from swarmllm.api.output.buffered_generation import TextDelta
from swarmllm.api.output.response import EVENT_STREAM, WAITING
from swarmllm.api.output.swarm_report import llamacpp_timings, swarm_object
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.generation import GeneratedText, Generation
from swarmllm_proto.ipc import Sampling, TokenLogprob

DRAWN = 2**32 - 1
"""What that server says of a seed that is drawn."""
SAMPLERS = ("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_SAME_NAME = (
    *("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "repeat_last_n"),
    *("repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "mirostat", "mirostat_tau", "mirostat_eta", "ignore_eos", "grammar"),
)


def generation_settings(
    sampling: Sampling,
    *,
    limit: int | None,
    n_probs: int,
    end_tokens: Iterable[int],
    stream: bool,
) -> Json:
    """What an answer is made with. `end_tokens`: those that cannot come, where the end of a text is
    ignored."""
    n_predict = -1 if limit is None else limit
    biases: list[Json] = [{"token": token, "bias": bias} for token, bias in sampling.logit_bias]
    biases += [{"token": token, "bias": None} for token in sorted(end_tokens)]
    told: Json = {name: getattr(sampling, name) for name in _SAME_NAME}
    return told | {
        "seed": DRAWN if sampling.seed is None else sampling.seed,
        "typical_p": sampling.typical_p,
        "stop": list(sampling.stop),
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "n_probs": n_probs,
        "stream": stream,
        "logit_bias": biases,
        "samplers": list(SAMPLERS),
        # What is not offered here, as that server says that it is off.
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "n_keep": 0,
        "n_discard": 0,
        "min_keep": 0,
        "post_sampling_probs": False,
        "lora": [],
    }


class NativeReply:
    """An answer to one prompt."""

    stream_type = EVENT_STREAM

    def __init__(
        self,
        model: str,
        prompt: str,
        *,
        index: int,
        limit: int | None,
        settings: Json,
        returns_tokens: bool,
        fields: Sequence[str],
        is_one_of_several: bool,
    ) -> None:
        """`prompt`: as text. `limit`: of tokens, None: the context. `fields`: what is told of a whole answer;
        none: all."""
        self._head: Json = {"index": index, "model": model}
        self._prompt = prompt
        self._limit = limit
        self._settings = settings
        self._returns_tokens = returns_tokens
        self._fields = fields
        self._is_one_of_several = is_one_of_several
        self._unsent: list[GeneratedText] = []
        """Tokens of which no text has come yet."""
        self._has_new_line = False

    def full(self, text_delta: TextDelta, generation: Generation) -> bytes:
        return self.body([self.choice(text_delta, generation)], {}, generation)

    def choice(self, text_delta: TextDelta, generation: Generation) -> Json:
        self._has_new_line = "\n" in text_delta.text
        tokens = [piece.token for piece in text_delta.pieces] if self._returns_tokens else []
        told = self._end(text_delta.text, generation) | {"tokens": tokens} | _probabilities(text_delta.pieces)
        if not self._fields:
            return told
        return {name: value for name in self._fields for value in _found(told, name)}

    def body(self, choices: list[Json], usage: Json, generation: Generation) -> bytes:
        return encode(choices if self._is_one_of_several else choices[0])

    def first(self, generation: Generation | None) -> bytes:
        return b""

    def text(self, text_delta: TextDelta) -> bytes:
        """One event per token that adds text; those that add none come with the next one."""
        events: list[bytes] = []
        for piece in text_delta.pieces:
            self._unsent.append(piece)
            if piece.text:
                events.append(self._text_event(piece.text))
        return b"".join(events)

    def waiting(self) -> bytes:
        return WAITING

    def last(self, generation: Generation) -> bytes:
        return self.finish(generation)

    def finish(self, generation: Generation) -> bytes:
        return self._event(self._end("", generation) | {"tokens": []})

    def end(self, usage: Json) -> bytes:
        return b""

    def error(self, error: SwarmLLMError) -> bytes:
        return self._event({"error": error_object(error)})

    def _text_event(self, text: str) -> bytes:
        pieces, self._unsent = self._unsent, []
        self._has_new_line |= "\n" in text
        told: Json = {"content": text, "tokens": [piece.token for piece in pieces], "stop": False}
        return self._event(self._head | told | _probabilities(pieces))

    def _end(self, text: str, generation: Generation) -> Json:
        by_word = generation.stop_sequence is not None
        by_limit = generation.finish_reason == "length"
        return self._head | {
            "content": text,
            "stop": True,
            "prompt": self._prompt,
            "stop_type": "word" if by_word else "limit" if by_limit else "eos",
            "stopping_word": generation.stop_sequence or "",
            "has_new_line": self._has_new_line,
            "generation_settings": self._settings,
            "tokens_predicted": generation.n_generated,
            "tokens_evaluated": generation.n_prompt_tokens,
            "tokens_cached": generation.n_prompt_tokens + generation.n_generated,
            # The context was full before.
            "truncated": by_limit and (self._limit is None or generation.n_generated < self._limit),
            "timings": llamacpp_timings(generation),
            "swarm": swarm_object(generation),
        }

    @staticmethod
    def _event(fields: Json) -> bytes:
        return b"data: " + encode(fields) + b"\n\n"


def _found(told: Json, path: str) -> list[object]:
    """What stands at `a/b`, or nothing."""
    found: object = told
    for name in path.split("/"):
        if not isinstance(found, dict) or name not in found:
            return []
        found = found[name]
    return [found]


def _probabilities(pieces: Sequence[GeneratedText]) -> Json:
    """Nothing where nobody asked."""
    told = [_token(piece.logprobs) for piece in pieces if piece.logprobs]
    return {"completion_probabilities": told} if told else {}


def _token(logprobs: tuple[TokenLogprob, ...]) -> Json:
    chosen, *top = logprobs
    return _likely(chosen) | {"top_logprobs": [_likely(each) for each in top]}


def _likely(each: TokenLogprob) -> Json:
    text = each.piece.decode("utf-8", "replace")
    return {"id": each.token, "token": text, "bytes": list(each.piece), "logprob": each.logprob}
