"""Shares the KV cells that a node has of a model among the nodes that ask for them, and its own users. Pure.

Only prompts count, because their cells are certain and the length of an answer is not. As long as all prompts
fit, each request is taken. Where they do not, each origin has an equal share, and so have the node's own
users while they use the model. All origins that have earned no trust count as one, as with places (see
`capacity`), and divide that share among themselves. A request that would exceed its origin's share is refused
for now. For a request within the share, requests above the share of their origins are given up after their
turn, the largest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmllm.pipeline.stage.capacity import StageAdmission, StagePlace, may_be_given_up
from swarmllm_proto.identifiers import NodeId


@dataclass(frozen=True, slots=True)
class HeldCells:
    """The cells that the prompt of one request of another node holds."""

    place: StagePlace
    n_cells: int


def ask_for_cells(
    origin: NodeId,
    n_cells: int,
    taken: Sequence[HeldCells],
    own_cells: int,
    n_ctx: int,
    now_s: float,
    has_earned: Callable[[NodeId], bool],
) -> StageAdmission:
    """Whether a request of `origin` with a prompt of `n_cells` is taken, and which one has to go for it.
    `own_cells`: of this node's own users. `has_earned`: whether a node has shown that it is worth trust."""
    held: Counter[NodeId] = Counter()
    for each in taken:
        held[each.place.origin] += each.n_cells
    origins = {*held, origin}
    if own_cells + held.total() + n_cells <= n_ctx or (origins == {origin} and not own_cells):
        return StageAdmission(is_granted=True)  # Alone, it learns from the worker what fits.
    newcomers = {each for each in origins if not has_earned(each)}
    fair = n_ctx // (len(origins - newcomers) + bool(newcomers) + bool(own_cells))
    fair_of = {each: fair // (len(newcomers) if each in newcomers else 1) for each in origins}
    if held[origin] + n_cells > fair_of[origin]:
        return StageAdmission(is_granted=False)
    above = [
        each
        for each in taken
        if held[each.place.origin] > fair_of[each.place.origin]
        and may_be_given_up(each.place, now_s, is_for_share=True)
    ]
    if not above:
        return StageAdmission(is_granted=True)
    chosen = max(above, key=lambda each: (not each.place.has_begun, each.n_cells, each.place.request_id))
    return StageAdmission(is_granted=True, instead_of=chosen.place.request_id)
