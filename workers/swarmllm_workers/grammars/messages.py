"""Messages between a worker and the process that follows its grammars: msgpack, one message a frame."""

from __future__ import annotations

from typing import Final

import msgspec

MESSAGE_MAX: Final = 4 * 2**20
"""Bytes of one message."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar for the text: GBNF, or JSON under a schema between two texts, up to `n_max` times."""

    grammar: str = ""
    json_schema: str = ""
    before: str = ""
    after: str = ""
    n_max: int = 1

    @property
    def field(self) -> str:
        """The field of `Sampling` that it came from."""
        return "sampling.grammar" if self.grammar else "sampling.json_schema"


class Compile(msgspec.Struct, frozen=True, tag=True):
    """The first message to a child. Answered by Compiled or Refused."""

    spec: GrammarSpec
    budget_s: float
    """Of processor time; the child ends itself when it is spent. So in every message."""


class FindMask(msgspec.Struct, frozen=True, tag=True):
    """Keep `n_kept` of the tokens that were followed, follow `tokens`, and find out which ones may come next.
    Answered by Mask or Refused."""

    n_kept: int
    tokens: list[int]
    budget_s: float


class CheckToken(msgspec.Struct, frozen=True, tag=True):
    """As FindMask, for one candidate. Answered by Verdict or Refused."""

    n_kept: int
    tokens: list[int]
    candidate: int
    budget_s: float


class Compiled(msgspec.Struct, frozen=True, tag=True):
    pass


class GrammarRefused(msgspec.Struct, frozen=True, tag=True):
    """The grammar cannot be followed, or not up to that token."""

    reason: str


class Mask(msgspec.Struct, frozen=True, tag=True):
    """A bit per token, the lowest bit of a byte first; tokens beyond the last byte cannot come next."""

    bits: bytes


class GrammarVerdict(msgspec.Struct, frozen=True, tag=True):
    allowed: bool


Ask = Compile | FindMask | CheckToken
Answer = Compiled | GrammarRefused | Mask | GrammarVerdict

encode: Final = msgspec.msgpack.Encoder().encode
decode_ask: Final = msgspec.msgpack.Decoder(Ask).decode
decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode
