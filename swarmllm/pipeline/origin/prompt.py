"""What a client wants answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarmllm.errors import InvalidRequest
from swarmllm.models import CatalogueEntry
from swarmllm_proto.ipc import Effort
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
    session: str = ""
    """The conversation of which this is a turn, where the client says so."""
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
