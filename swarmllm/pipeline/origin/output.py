"""Tracks prompt chunks and tokens that a pipeline returns to the origin: pure, without a clock.

`PromptWindow` says which chunk of the prompt leaves next. It counts positions, not messages: whatever was
lost, sent twice or arrived late, "up to here it has passed, up to here it has left" stays true, and
repeating is setting one number back.

`EarlyTokens` keeps the tokens that came before the one before them: some go by links and some by daemons, and
may overtake each other.

`TokenLog` says whether a token is the next one, and which token to repeat when a stage reports damage. The
report and the token it concerns come from different nodes, so the report may be first: then the token is
repeated when it arrives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from swarmllm.pipeline.stage.compute import SampledToken
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.picture_runs import PictureRun, whole_before

EARLY_TOKENS_MAX: Final = 256
"""Tokens that may wait for one before them. A ring that turns by links gives tokens faster than a busy daemon
passes them on, but no daemon is so far behind."""
EARLY_BYTES_MAX: Final = 2**20
"""Of their texts."""
MAX_PIECE_BYTES: Final = 64 * 1024
"""Of text that comes with one token. A stop string may hold text back, but not for long: it has 256
characters."""
Item = TypeVar("Item")


class InvalidReport(Exception):
    """A stage sent something that cannot be true for this request."""


class RowsNotSent(InvalidReport):
    """The last stage reports more rows than were sent: a stage on the way added some, or the last stage
    lies."""


class PrematureEnd(InvalidReport):
    """The last stage ended the text too early for what was asked."""


class Chunk(NamedTuple):
    """Rows [position, position + n_tokens) of the prompt; `left` rows come after them."""

    position: int
    n_tokens: int
    left: int
    until: int | None = None
    """The last stage that is to compute them; None: the pipeline's last."""


class PromptWindow:
    """`size` chunks of `chunk_tokens` may be under way at once: one more than there are stages, so that
    every stage has one to work on and one is waiting."""

    def __init__(
        self,
        n_tokens: int,
        chunk_tokens: int,
        size: int,
        n_known: int = 0,
        ends: Sequence[int] = (),
        runs: Sequence[PictureRun] = (),
    ) -> None:
        """`n_known`: rows at the beginning that every stage has already. `ends`: positions, ascending, beyond
        which no chunk that begins before them goes. `runs`: of those whose rows see each other each is one
        chunk, and of the others that are not divisible each leaves again as a whole."""
        if min(n_tokens, chunk_tokens, size) < 1:
            raise ValueError("prompt, chunk and window have at least one token")
        if not 0 <= n_known < n_tokens:
            raise ValueError(f"{n_known} rows of {n_tokens} are known: the last one has to be computed")
        self.n_tokens = n_tokens
        self.n_sent = n_known
        self.n_passed = n_known
        self._n_known = n_known
        self._ends = tuple(ends)
        self._runs = tuple(runs)
        self._chunk_tokens = chunk_tokens
        self._size = size

    def __repr__(self) -> str:
        return f"<PromptWindow passed={self.n_passed} sent={self.n_sent} of={self.n_tokens}>"

    def next_chunk(self) -> Chunk | None:
        """Take the next chunk; None while the window is full or when everything has left."""
        if not self.may_send():
            return None
        position = self.n_sent
        self.n_sent = self._end_of_chunk(position)
        return Chunk(position, self.n_sent - position, self.n_tokens - self.n_sent)

    def _end_of_chunk(self, position: int) -> int:
        """Of the one that begins there."""
        for run in self._runs:
            if run.first_row == position and not run.is_causal:
                return min(run.end, self.n_tokens)
        after = bisect_right(self._ends, position)
        limit = self._ends[after] if after < len(self._ends) else self.n_tokens
        return min(position + self._chunk_tokens, limit, self.n_tokens)

    def _begins_chunk(self, position: int) -> bool:
        begins = self._n_known
        while begins < position:
            begins = self._end_of_chunk(begins)
        return begins == position

    def may_send(self) -> bool:
        """Whether `next_chunk` would give one now."""
        n_under_way = self.n_sent - self.n_passed
        return self.n_sent < self.n_tokens and n_under_way < self._size * self._chunk_tokens

    def passed(self, position: int) -> bool:
        """Rows below `position` have passed every layer; whether more than before. Raises RowsNotSent for
        rows that have not left."""
        if position > self.n_sent:
            raise RowsNotSent(f"rows up to {position} are said to be done, {self.n_sent} have been sent")
        has_advanced = position > self.n_passed
        self.n_passed = max(self.n_passed, position)
        return has_advanced

    def rewind(self, position: int) -> None:
        """The chunk at `position` and all after it leave again. Raises InvalidReport where no chunk that
        is under way begins."""
        if not self.n_passed <= position < self.n_sent or not self._begins_chunk(position):
            raise InvalidReport(f"no chunk that is under way begins at {position}")
        self.n_sent = whole_before(self._runs, position)


class EarlyTokens(Generic[Item]):
    """Tokens that came early, by index; bounded in number and bytes."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Item, int]] = {}
        self._n_bytes = 0

    def put(self, index: int, item: Item, n_bytes: int, due: int) -> None:
        """`due` is the index that is to come next; of two with the same index the first stays. Raises
        InvalidReport for one that is too far ahead, or with too much text."""
        if index > due + EARLY_TOKENS_MAX:
            raise InvalidReport(f"token {index} came {index - due} ahead of its turn")
        if index in self._waiting or index < due:
            return
        if self._n_bytes + n_bytes > EARLY_BYTES_MAX:
            raise InvalidReport(f"more than {EARLY_BYTES_MAX} bytes of text came ahead of their turn")
        self._waiting[index] = item, n_bytes
        self._n_bytes += n_bytes

    def take(self, index: int) -> Item | None:
        """What waits for this turn, if anything does."""
        item, n_bytes = self._waiting.pop(index, (None, 0))
        self._n_bytes -= n_bytes
        return item


@dataclass(slots=True)
class Blamed:
    """The nodes because of which an attempt failed, as far as they are known."""

    culprit: NodeId | None = None
    """The node that failed."""
    doubted: frozenset[NodeId] = frozenset()
    """Nodes of which one failed, where it cannot be known which."""
    has_stalled: bool = False
    """The culprit had work and did none."""
    has_lied: bool = False
    """The culprit said what cannot be so."""

    def blame(self, node_id: NodeId) -> None:
        """The first node that is named is the culprit: what else fails is usually its consequence."""
        self.culprit = self.culprit or node_id

    def separate(self, node_id: NodeId, other: NodeId) -> None:
        """One does not reach the other: the next pipeline is to do without either, where it can."""
        if self.culprit is None:
            self.doubted = frozenset({node_id, other})

    def lied(self, node_id: NodeId) -> None:
        """It said what cannot be so."""
        self.has_lied = self.culprit is None
        self.blame(node_id)

    def stalled(self, node_id: NodeId) -> None:
        """It has had work and does none."""
        self.has_stalled = self.culprit is None
        self.doubted = frozenset({node_id})
        self.blame(node_id)


@dataclass(slots=True)
class TokenLog:
    """Tokens sampled so far, as the origin knows them; those of an earlier pipeline count as received."""

    n_prompt_tokens: int
    max_tokens: int
    n_received: int = 0
    last_token: int = 0
    awaited: bool = False
    """The next token is to be repeated as soon as it arrives."""

    def receive(self, index: int, token: int) -> bool:
        """True: the next one. False: known already. Raises InvalidReport: one was skipped, or there are
        too many."""
        if index < self.n_received:
            return False
        if index > self.n_received:
            raise InvalidReport(f"token {index} came where {self.n_received} was next")
        if index >= self.max_tokens:
            raise InvalidReport(f"more than the {self.max_tokens} tokens asked for")
        self.n_received += 1
        self.last_token = token
        return True

    @property
    def is_full(self) -> bool:
        """As many as were asked for."""
        return self.n_received >= self.max_tokens

    def position(self) -> int:
        """Where the newest token stands."""
        return self.n_prompt_tokens + self.n_received - 1

    def repeats_now(self, position: int) -> bool:
        """A job at `position` was damaged. True: repeat the newest token; False: its token is still on its
        way here. Raises InvalidReport for a position where no job can be."""
        ahead = position - self.n_prompt_tokens - self.n_received
        if ahead == -1:
            return True
        if ahead == 0 and self.n_received < self.max_tokens:
            self.awaited = True
            return False
        raise InvalidReport(f"no job is under way at {position}")


def require_token(token: int, n_vocab: int, n_bytes: int) -> None:
    """Raises InvalidReport for one that the model does not have, or that comes with too much text."""
    if token >= n_vocab:
        raise InvalidReport(f"token {token} of a vocabulary of {n_vocab}")
    if n_bytes > MAX_PIECE_BYTES:
        raise InvalidReport(f"a token of {n_bytes} bytes")


def require_stop_string(token: SampledToken, n_stop: int) -> None:
    """Raises InvalidReport if the stage names a stop string that is not one of the `n_stop`."""
    if token.stopped_by is None:
        return
    if token.stopped_by >= n_stop or token.finish_reason != "stop":
        raise InvalidReport(f"stop string {token.stopped_by} of {n_stop} is said to have ended the text")


def require_end(token: SampledToken, sampling: Sampling, *, is_full: bool) -> None:
    """Raises PrematureEnd for an end that no honest last stage tells: for want of room with fewer tokens than
    were asked for (the origin has fitted these to the context), or by a token that is to end nothing.
    `is_full`: as many tokens as were asked for have come, this one included."""
    if token.finish_reason == "length" and not is_full:
        raise PrematureEnd("as many tokens as were asked for are said to have come, and have not")
    if token.finish_reason == "stop" and token.stopped_by is None and sampling.ignore_eos:
        raise PrematureEnd("a token is said to have ended a text that none was to end")
