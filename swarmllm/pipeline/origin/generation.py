"""Gives a client the text of one answer as it is made, and the account of how it was made.

The account is kept per stage and in seconds. What a stage computed is measured where it computes. Network
time cannot be measured between two clocks, so the origin infers it: the time from one token to the next, less
the time that stages report for it, is the time of all hops together. Each hop of the ring (the one back to
the first stage included) gets an even share; a hop between two stages of one node counts as none.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from msgspec import UnsetType

from swarmllm.errors import InvalidRequest
from swarmllm.models import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pictures import NO_PICTURES, PromptPictures
from swarmllm.pipeline.origin.pictures import EncodedBy
from swarmllm.pipeline.stage.compute import SampledToken
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Effort, FinishReason, GuessCount, Scores, TokenLogprob
from swarmllm_proto.limits import GUESSES_MAX
from swarmllm_proto.swarm import Stage, StageTiming
from swarmllm_proto.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """Either `messages` (and `tools`), which go through the model's chat template, or `text` as it is, or the
    ids of its `tokens`.

    Never shown in a repr: prompts stay out of logs. Raises InvalidRequest for none or more than one.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    effort: Effort | None = None
    """How much the model should think first."""
    template: str = ""
    """A chat template (Jinja) in place of the model's."""
    begun: str = ""
    """What the assistant has said of its answer already; it stands at the end of what the template makes of
    `messages`."""
    pictures: PromptPictures = NO_PICTURES
    """What the markers in the text, or in the messages' contents, stand for."""
    session: str = ""
    """The conversation of which this is a turn, where the client says so."""
    top_logprobs: int | None = None
    """Tell how likely its own tokens were, and which were likeliest, so many in place of each."""
    is_answered: bool = True
    """False: only its own tokens are asked about, with `top_logprobs`."""
    field: str = "messages"
    """What the client's API calls it, for refusals."""

    def __post_init__(self) -> None:
        if sum(form is not None for form in (self.messages, self.text, self.tokens)) != 1:
            raise InvalidRequest("a prompt is either messages, text or tokens", field="messages")

    def __repr__(self) -> str:
        if self.tokens is not None:
            return f"<Prompt tokens={len(self.tokens)}>"
        return "<Prompt text>" if self.messages is None else f"<Prompt messages={len(self.messages)}>"


def token_ids(entry: CatalogueEntry, ids: Sequence[int], field: str) -> Tensor:
    """i32 [n] from a client's own ids. Raises InvalidRequest for one that the model does not have."""
    n_vocab = entry.manifest.n_vocab
    if not all(0 <= token < n_vocab for token in ids):
        raise InvalidRequest(f"Token ids of {entry.name} lie in [0, {n_vocab}).", field=field)
    return np.array(ids, np.int32)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely the tokens of a prompt were."""

    first: str
    """The text of the first token, before which there is nothing that could make it likely."""
    others: Scores


Shape = Literal["local", "remote-generate", "chain"]
"""The worker here or elsewhere runs the whole decode loop, or jobs walk through several stages."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The text of one token; `text` is empty while a character or a stop string is incomplete."""

    text: str
    index: int
    token: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """The token's own and the likeliest ones, where the sampling asks for them."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage of the route, and what it took so far."""

    node_id: NodeId
    nickname: str
    layers: LayerRange
    compute_s: float = 0.0
    """Mean per generated token, after the first."""
    overhead_s: float = 0.0
    """Mean per generated token, after the first: what the stage's node spent besides computing (queue,
    IPC)."""
    network_s: float = 0.0
    """Mean per generated token, after the first: the hop from this stage to the next."""
    prefill_s: float = 0.0
    """Computing all rows of the prompt."""
    row_bytes: int | None = None
    """Of a token's row on its way to the next stage; None: the last stage sends tokens, and packed rows have
    no fixed size."""


@dataclass(frozen=True, slots=True)
class Timings:
    queue_s: float = 0.0
    """Waiting for admission."""
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    """From the first row's start to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""


class StageAccount:
    """Sums per stage, fed with the timings that tokens and prefill notes bring along."""

    def __init__(self, stages: Sequence[Stage], row_bytes: Sequence[int | None] = ()) -> None:
        """`row_bytes`: of each stage, as in its report."""
        self.stages = tuple(stages)
        n = len(self.stages)
        self._row_bytes = row_bytes or [None] * n
        self.prefill_s = [0.0] * n
        self.compute_s = [0.0] * n
        self.busy_s = [0.0] * n
        self.n_decoded = 0

    def add_prefill(self, timings: Sequence[StageTiming]) -> None:
        for timing in timings:
            if timing.stage < len(self.stages):
                self.prefill_s[timing.stage] += timing.compute_s

    def add_decoded(self, timings: Sequence[StageTiming]) -> None:
        self.n_decoded += 1
        for timing in timings:
            if timing.stage < len(self.stages):
                self.compute_s[timing.stage] += timing.compute_s
                self.busy_s[timing.stage] += timing.busy_s

    def reports(self, nicknames: Sequence[str], decode_s: float) -> tuple[StageReport, ...]:
        n = max(1, self.n_decoded)
        network_s = self._network_s(decode_s)
        return tuple(
            StageReport(
                node_id=stage.node_id,
                nickname=nicknames[index],
                layers=LayerRange(stage.start, stage.end),
                compute_s=self.compute_s[index] / n,
                overhead_s=max(0.0, self.busy_s[index] - self.compute_s[index]) / n,
                network_s=network_s[index],
                prefill_s=self.prefill_s[index],
                row_bytes=self._row_bytes[index],
            )
            for index, stage in enumerate(self.stages)
        )

    def _network_s(self, decode_s: float) -> list[float]:
        after = (*self.stages[1:], self.stages[0])
        is_hop = [stage.node_id != then.node_id for stage, then in zip(self.stages, after, strict=True)]
        if not self.n_decoded or not any(is_hop):
            return [0.0] * len(is_hop)
        share_s = max(0.0, decode_s - sum(self.busy_s)) / self.n_decoded / sum(is_hop)
        return [share_s * hop for hop in is_hop]


def described(stages: Sequence[Stage], name: Callable[[NodeId], str]) -> str:
    return " -> ".join(f"{stage.start}:{stage.end}@{name(stage.node_id)}" for stage in stages)


class SpeculationCounts(NamedTuple):
    """Tokens that were guessed ahead of the model (speculation)."""

    ways: tuple[GuessCount, ...] = ()

    @classmethod
    def reported(cls, counts: tuple[int, int] | UnsetType, n_tokens: int) -> SpeculationCounts:
        """By another node, of a request with so many tokens: guesses (checked, right). Counts that cannot be
        are none."""
        n_checked, n_right = counts or (0, 0)
        if not 0 < n_checked <= GUESSES_MAX * n_tokens or n_right > min(n_checked, n_tokens):
            return cls()
        return cls((GuessCount("chain", n_checked, n_right),))

    @property
    def checked(self) -> int:
        return sum(way.n_checked for way in self.ways)

    @property
    def right(self) -> int:
        """Of those, the ones that the model then said: tokens that took no step of their own."""
        return sum(way.n_right for way in self.ways)


@dataclass(frozen=True, slots=True)
class FetchedPrefix:
    """KV of a prompt's beginning that another node gave for a request."""

    node_id: NodeId
    n_tokens: int
    n_bytes: int
    seconds: float
    other_format: bool = False
    """It was computed with other kernels than this node's worker has, or rounded."""


class TokenSource(Protocol):
    """A source of tokens: this node's worker, or a chain of stages."""

    @property
    def shape(self) -> Shape: ...

    async def next(self) -> tuple[SampledToken, bytes]:
        """Not to be called after a token with a finish reason. Raises SwarmLLMError."""
        ...

    @property
    def route(self) -> tuple[StageReport, ...]: ...

    @property
    def prefill_s(self) -> float: ...

    @property
    def decode_s(self) -> float: ...

    @property
    def n_generated(self) -> int: ...

    @property
    def n_cached_tokens(self) -> int: ...

    @property
    def guesses(self) -> SpeculationCounts: ...

    @property
    def is_rebuilt(self) -> bool:
        """It goes on with what a broken pipeline left."""
        ...


class FailoverSource(TokenSource, Protocol):
    """A source of tokens that fails over to other pipelines."""

    @property
    def fetched(self) -> FetchedPrefix | None: ...

    @property
    def n_recoveries(self) -> int:
        """How often another pipeline went on after a token."""
        ...

    @property
    def n_rebuilt(self) -> int:
        """Of these, how often only the lost stages were computed again."""
        ...

    @property
    def is_exact(self) -> bool:
        """No rows were rounded on their way between stages, and no KV came from another node in another
        format."""
        ...

    @property
    def recovery_s(self) -> float:
        """From knowing that a pipeline had broken to the next token, all in all."""
        ...


class Generation:
    """Iterate once for the text; everything else can be read at any time and grows with it."""

    def __init__(
        self,
        source: FailoverSource,
        first: tuple[SampledToken, bytes] | None,
        *,
        request_id: str,
        n_prompt_tokens: int,
        stop: Sequence[str] = (),
        queue_s: float = 0.0,
        tokenize_s: float = 0.0,
        is_apart: bool = False,
        prompt: PromptScores | None = None,
        looked: Sequence[EncodedBy] = (),
    ) -> None:
        """`first` None: there is nothing to come. `prompt`: where that was asked for."""
        self.looked = tuple(looked)
        """Who looked at each picture of the prompt."""
        self.is_apart = is_apart
        """Computed in cells and batches of its own."""
        self.request_id = request_id
        self.n_prompt_tokens = n_prompt_tokens
        self.prompt = prompt
        self.finish_reason: FinishReason | None = "length" if first is None else None
        self.stop_sequence: str | None = None
        """Which one of the `stop` strings ended it."""
        self._stop = tuple(stop)
        self._source = source
        self._first = first
        self._queue_s = queue_s
        self._tokenize_s = tokenize_s
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __repr__(self) -> str:
        stages = " ".join(f"{stage.layers}@{stage.node_id[:12]}" for stage in self.route)
        return f"<Generation {self.request_id} {self.shape} {stages} n={self.n_generated}>"

    @property
    def shape(self) -> Shape:
        return self._source.shape

    @property
    def is_local(self) -> bool:
        return self._source.shape == "local"

    @property
    def route(self) -> tuple[StageReport, ...]:
        return self._source.route

    @property
    def n_generated(self) -> int:
        """Tokens sampled so far, an end-of-sequence token included."""
        return self._source.n_generated

    @property
    def n_cached_tokens(self) -> int:
        """Of the prompt: not computed, because an earlier request began alike. Known at the end."""
        return self._source.n_cached_tokens

    @property
    def fetched(self) -> FetchedPrefix | None:
        """KV of the prompt's beginning that came for it from another node."""
        return self._source.fetched

    @property
    def guesses(self) -> SpeculationCounts:
        """Known at the end."""
        return self._source.guesses

    @property
    def n_recoveries(self) -> int:
        """How often another pipeline went on after one had broken."""
        return self._source.n_recoveries

    @property
    def n_rebuilt(self) -> int:
        """Of these, how often only the lost stages were computed again."""
        return self._source.n_rebuilt

    @property
    def is_exact(self) -> bool:
        """No rows were rounded on their way between stages, and no KV came from another node in another
        format: the text is that of the uncut model on this node. Of kept KV it is known at the end."""
        return self._source.is_exact

    @property
    def recovery_s(self) -> float:
        """From knowing that a pipeline had broken to the next token, all in all."""
        return self._source.recovery_s

    @property
    def timings(self) -> Timings:
        return Timings(self._queue_s, self._tokenize_s, self._source.prefill_s, self._source.decode_s)

    def __aiter__(self) -> AsyncIterator[GeneratedText]:
        return self

    async def __anext__(self) -> GeneratedText:
        """Raises SwarmLLMError when the pipeline fails; what came before stands."""
        if self.finish_reason is not None:
            raise StopAsyncIteration
        if self._first is not None:
            (token, piece), self._first = self._first, None
        else:
            token, piece = await self._source.next()
        self.finish_reason = token.finish_reason
        if token.stopped_by is not None and token.stopped_by < len(self._stop):
            self.stop_sequence = self._stop[token.stopped_by]
        text = self._characters.decode(piece, final=token.finish_reason is not None)
        return GeneratedText(text, token.index, token.token, token.finish_reason, token.logprobs)
