"""When a route leads over nodes with which there has been no connection."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from node_ids import A, B, C

from swarmllm.errors import NoPipeline
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.untried import (
    DIAL_S,
    GAIN,
    PAUSE_MAX_S,
    PAUSE_S,
    UntriedNodes,
    unless_much_longer,
)

from .test_assembly import stages


def route(node: str, cost_s: float) -> Assembly:
    return Assembly(stages(f"{node} 0:6"), (None,), cost_s=cost_s)


class Routes:
    """The cheapest of some routes, without those of suspects where there are others."""

    def __init__(self, *routes: Assembly) -> None:
        self.routes = sorted(routes, key=lambda each: each.cost_s)
        self.asked: list[Sequence[str]] = []

    def find(self, suspects: Sequence[str]) -> Assembly:
        self.asked.append(tuple(suspects))
        found = [each for each in self.routes if each.node_ids.isdisjoint(suspects)] or self.routes
        if not found:
            raise NoPipeline("nobody has it")
        return found[0]


@pytest.mark.parametrize(
    ("without_s", "chosen"),
    [(GAIN * 2.0 + DIAL_S, "a"), (GAIN * 2.0 + DIAL_S + 0.01, "b")],
    ids=["little longer", "much longer"],
)
def test_an_untried_node_is_spared_unless_the_route_takes_much_longer_then(
    without_s: float, chosen: str
) -> None:
    routes = Routes(route("a", without_s), route("b", 2.0))
    assert unless_much_longer(routes.find, (), {B}) is next(
        each for each in routes.routes if each.node_ids == {{"a": A, "b": B}[chosen]}
    )


def test_a_suspect_is_spared_at_any_price() -> None:
    routes = Routes(route("a", 100.0), route("b", 1.0), route("c", 50.0))
    assert unless_much_longer(routes.find, (B,), {C, B}).node_ids == {C}
    assert routes.asked == [(B,), (B, C)]


def test_where_the_best_route_leads_over_no_untried_node_one_search_is_enough() -> None:
    routes = Routes(route("b", 1.0), route("a", 2.0))
    assert unless_much_longer(routes.find, (C,), {A}).node_ids == {B}
    assert routes.asked == [(C,)]


def test_where_all_nodes_are_untried_none_is_spared_by_a_long_way_round() -> None:
    best, longest = route("b", 1.0), route("a", 100.0)

    def find(suspects: Sequence[str]) -> Assembly:
        """As `sparing` does: without all there is no route, so it spares as many as it can."""
        return longest if suspects else best

    assert unless_much_longer(find, (), {A, B, C}) is best
    with pytest.raises(NoPipeline):
        unless_much_longer(Routes().find, (), {B})


def test_each_dial_in_vain_is_followed_by_a_longer_pause() -> None:
    untried, now_s = UntriedNodes(), 100.0
    for n_failures in range(8):
        assert untried.may_be_taken(now_s)
        untried.failed(now_s)
        pause_s = min(PAUSE_MAX_S, PAUSE_S * 2**n_failures)
        untried.failed(now_s + pause_s - 1)
        assert not untried.may_be_taken(now_s + pause_s - 0.1), "two that fail at once are one failure"
        now_s += pause_s
    assert pause_s == PAUSE_MAX_S


def test_one_that_accepts_makes_up_for_one_that_was_not_there() -> None:
    untried = UntriedNodes()
    untried.accepted()
    untried.failed(0.0)
    untried.accepted()
    untried.failed(PAUSE_S)
    assert untried.may_be_taken(2 * PAUSE_S)
