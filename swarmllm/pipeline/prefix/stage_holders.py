"""Remembers which stages of this node's earlier requests keep KV of which beginnings. Pure.

Other stages fetch KV from them, so that a node which takes over layers need not compute what the one before
it has computed. Names that this node gave to stages mean something to it and to those stages only, so the
origin alone can tell a stage who keeps what; and a stage that kept KV for this origin's requests could have
been chosen to use it.

All stages begin at the same row, so a beginning counts as far as every stage has it or may fetch it. Stages
whose own rows rest on KV of another node are remembered, but nobody is sent to them: they give away only
what they computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from swarmllm.pipeline.prefix.choice import whole_blocks
from swarmllm.pipeline.prefix.names import PrefixNames
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc.kv import join_names
from swarmllm_proto.swarm import DIGEST_SIZE, NAMES_MAX, KeptElsewhere
from swarmllm_proto.tensors import Tensor

REMEMBERED_MAX: Final = 512
"""Beginnings, each at one stage; the one that was computed longest ago is forgotten."""
REMEMBERED_S: Final = 600.0
"""As long as stages keep KV by default that nobody asks for."""
SOURCES_MAX: Final = 2
"""That one stage is told."""
BLOCKS_MAX: Final = NAMES_MAX // DIGEST_SIZE


@dataclass(slots=True, eq=False)
class _KeptAtStage:
    model_id: ModelId
    rounding: bytes
    """See `PrefixNames`."""
    node_id: NodeId
    layers: tuple[int, int]
    names: tuple[bytes, ...]
    rests_on_peer: bool
    computed_s: float

    @property
    def at(self) -> tuple[NodeId, tuple[int, int]]:
        return self.node_id, self.layers


class _Found(NamedTuple):
    n_blocks: int
    """Of a prompt."""
    kept: _KeptAtStage
    names: tuple[bytes, ...]
    """Of the prompt's blocks there."""


class StageHolders:
    def __init__(self) -> None:
        self._kept: list[_KeptAtStage] = []
        """The one that was computed last at the end."""

    def __len__(self) -> int:
        return len(self._kept)

    def completed(self, names: PrefixNames, tokens: Tensor, fetched: Collection[int], now_s: float) -> None:
        """The stages of a request have computed these tokens, and keep their KV. `fetched`: stages whose
        first rows came from another node."""
        for index, stage in enumerate(names.stages):
            hashes = names.of_stage(index, tokens[: BLOCKS_MAX * BLOCK_TOKENS])
            if not hashes:
                return
            kept = _KeptAtStage(
                names.model_id,
                names.rounding(index),
                stage.node_id,
                (stage.start, stage.end),
                hashes,
                index in fetched,
                now_s,
            )
            self._kept = [each for each in self._kept if not _replaces(kept, each)]
            self._kept.append(kept)
        self._kept = [each for each in self._kept if each.computed_s + REMEMBERED_S > now_s][-REMEMBERED_MAX:]

    def rests_on_peer(self, names: PrefixNames, index: int, tokens: Tensor) -> bool:
        """Whether what a stage keeps of this prompt's first block rests on KV that it was told to fetch."""
        stage = names.stages[index]
        first = names.of_stage(index, tokens[:BLOCK_TOKENS])
        return any(
            each.rests_on_peer
            and each.at == (stage.node_id, (stage.start, stage.end))
            and each.names[:1] == first
            for each in self._kept
        )

    def sources(
        self,
        names: PrefixNames,
        tokens: Tensor,
        may_give: Callable[[NodeId], bool],
        now_s: float,
        stays: Collection[int] = (),
    ) -> tuple[KeptElsewhere, ...]:
        """Where the stages of a new request may fetch KV of the prompt's beginning: of as many blocks as
        every stage has or may fetch, and nothing where all have them. `stays`: stages that have all rows of
        a pipeline that broke."""
        n_max = min(whole_blocks(len(tokens)), BLOCKS_MAX)
        prompt = tokens[: n_max * BLOCK_TOKENS]
        here: list[int] = []
        elsewhere: list[list[_Found]] = []
        for index, stage in enumerate(names.stages):
            found = self._of_stage(names, index, prompt, now_s)
            at_stage = stage.node_id, (stage.start, stage.end)
            n_here = max((n for n, kept, _ in found if kept.at == at_stage), default=0)
            here.append(n_max if index in stays else n_here)
            elsewhere.append(
                [
                    each
                    for each in found
                    if each.kept.node_id != stage.node_id
                    and not each.kept.rests_on_peer
                    and may_give(each.kept.node_id)
                ]
            )
        n_blocks = min(
            max(n_here, *(each.n_blocks for each in found), 0)
            for n_here, found in zip(here, elsewhere, strict=True)
        )
        sources: list[KeptElsewhere] = []
        for index, (n_here, found) in enumerate(zip(here, elsewhere, strict=True)):
            if n_here >= n_blocks:
                continue
            enough = [each for each in found if each.n_blocks >= n_blocks]
            sources += [
                _source(index, each.kept, each.names[:n_blocks], names) for each in enough[-SOURCES_MAX:]
            ]
        return tuple(sources)

    def _of_stage(self, names: PrefixNames, index: int, prompt: Tensor, now_s: float) -> list[_Found]:
        """Who keeps some of the prompt's blocks, of these layers or more."""
        stage, found = names.stages[index], list[_Found]()
        by_layers: dict[tuple[int, int], tuple[bytes, ...]] = {}
        for kept in self._kept:
            start, end = kept.layers
            if (kept.model_id, kept.rounding) != (names.model_id, names.rounding(index)):
                continue
            if not start <= stage.start < stage.end <= end or kept.computed_s + REMEMBERED_S <= now_s:
                continue
            hashes = by_layers.get(kept.layers)
            if hashes is None:
                hashes = by_layers[kept.layers] = names.of_stage(index, prompt, kept.layers)
            if n_blocks := _n_common(kept.names, hashes):
                found.append(_Found(n_blocks, kept, hashes))
        return found


def _replaces(newer: _KeptAtStage, older: _KeptAtStage) -> bool:
    """Whether it says all that the older one says: a stage drops rows of which it keeps a longer run."""
    return (
        (newer.model_id, newer.rounding, newer.at) == (older.model_id, older.rounding, older.at)
    ) and newer.names[: len(older.names)] == older.names


def _source(index: int, kept: _KeptAtStage, hashes: Sequence[bytes], names: PrefixNames) -> KeptElsewhere:
    stage = names.stages[index]
    is_same = kept.layers == (stage.start, stage.end)
    return KeptElsewhere(
        stage=index,
        node_id=kept.node_id,
        start=kept.layers[0],
        end=kept.layers[1],
        n_blocks=len(hashes),
        names=b"" if is_same else join_names(hashes),
    )


def _n_common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n
