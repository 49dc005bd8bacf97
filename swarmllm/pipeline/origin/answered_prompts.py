"""Remembers which prompts were answered by which stages, by their hashes. Pure.

The last of these stages may remember how such a prompt went on. It can send that before the prompt's rows
come, if it is told the prompt early enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.swarm import Stage
from swarmllm_proto.tensors import Tensor

PROMPTS_MAX: Final = 1024


class AnsweredPrompts:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """The one that was answered last stands last."""

    def __len__(self) -> int:
        return len(self._known)

    def answered(self, model_id: ModelId, stages: Sequence[Stage], prompt: Tensor) -> None:
        """`prompt`: i32 [n]."""
        key = _key(model_id, stages, prompt)
        self._known.pop(key, None)
        self._known[key] = None
        if len(self._known) > PROMPTS_MAX:
            self._known.popitem(last=False)

    def has(self, model_id: ModelId, stages: Sequence[Stage], prompt: Tensor) -> bool:
        return _key(model_id, stages, prompt) in self._known


def _key(model_id: ModelId, stages: Sequence[Stage], prompt: Tensor) -> bytes:
    names = " ".join(f"{stage.node_id}:{stage.start}:{stage.end}" for stage in stages)
    return blake3(f"{model_id} {names} ".encode() + prompt.astype("<i4", copy=False).tobytes()).digest()
