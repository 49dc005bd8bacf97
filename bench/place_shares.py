"""How many answers a node gives a member that others want to keep out: the production code that shares places
among origins, and a clock.

    python -m bench.place_shares [--seconds 600] [--seeds 3]

A node has eight places for requests of others. N members behave badly: they hold places by a job now and
then, assign and never give a job, ask for many places at once, break many requests off at once and ask
again, or give every request a new identity. One
honest member asks for one answer after the other, each of which takes five seconds of a place. It asks again
five seconds after it was refused, or when it had to give its place up. Its fair share is the time of all
places, divided by the number of members. The honest member is measured as one that has earned trust, beside
others that have, and as a newcomer beside newcomers. Members with a new identity each time are newcomers, and
all newcomers count as one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarmllm.pipeline.stage.capacity import OriginShares, StagePlace
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm_proto.identifiers import NodeId

CAPACITY = 8
ANSWER_S = 5.0
RETRY_S = 5.0
STEP_S = 0.5
BEGAN_BEFORE_S = 30.0
"""So long the others have had all places when the honest member comes."""
IDLE_S = 120.0
"""After which a request without a job is ended anyway."""
NEW = "a new identity each time"
BREAK_OFF = "break off at once"
KINDS = ("hold a place", "hold all places", "assign and give no job", BREAK_OFF, NEW)
MANY = ("hold all places", BREAK_OFF)
COUNTS = (1, 7, 8, 10, 100)
ME = node_id_named("me")


@dataclass
class Outcome:
    n_answers: int = 0
    n_refused: int = 0
    n_given_up: int = 0
    """Answers that were begun and had to be begun again elsewhere."""


@dataclass
class Places:
    """A node's, all of them for one model."""

    newcomers: set[NodeId]
    """Those of them that hold places or ask for one."""
    shares: OriginShares = field(default_factory=lambda: OriginShares(CAPACITY))
    taken: dict[str, StagePlace] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, origin: NodeId, now_s: float, *, has_begun: bool = True) -> str | None:
        """The request's id; None: refused."""
        admission = self.shares.ask(
            origin, self.taken.values(), now_s, lambda each: each not in self.newcomers
        )
        if not admission.is_granted:
            return None
        if admission.instead_of is not None:
            del self.taken[admission.instead_of]
        request_id = f"{next(self.ids):07}"
        self.taken[request_id] = StagePlace(request_id, origin, now_s, has_begun)
        return request_id


def run(kind: str, n_others: int, seconds: float, seed: int, *, has_earned: bool = True) -> Outcome:
    """`has_earned`: the honest member has, in whatever it did before."""
    rng, places, outcome = random.Random(seed), Places(set() if has_earned else {ME}), Outcome()
    others = [node_id_named(f"{kind} {number}") for number in range(n_others)]
    if not has_earned:
        places.newcomers.update(others)
    mine, ends_s, next_s = "", 0.0, BEGAN_BEFORE_S
    for step in range(int(seconds / STEP_S)):
        now_s = step * STEP_S
        for request_id, place in list(places.taken.items()):
            is_broken_off = kind == BREAK_OFF and place.origin != ME
            if is_broken_off or (not place.has_begun and now_s - place.assigned_s > IDLE_S):
                del places.taken[request_id]
        rng.shuffle(others)
        for index, other in enumerate(others):
            asker = other
            if kind == NEW:
                asker = node_id_named(f"new {step} {index}")
                places.newcomers.add(asker)
            for _ in range(CAPACITY if kind in MANY else 1):
                places.ask(asker, now_s + rng.random() * STEP_S, has_begun=kind != "assign and give no job")
        if mine and mine not in places.taken:
            outcome.n_given_up += 1
            mine, next_s = "", now_s + RETRY_S
        elif mine and now_s >= ends_s:
            del places.taken[mine]
            outcome.n_answers += 1
            mine, next_s = "", now_s
        if not mine and now_s >= next_s:
            mine = places.ask(ME, now_s + STEP_S) or ""
            outcome.n_refused += not mine
            ends_s, next_s = now_s + ANSWER_S, now_s + RETRY_S
    return outcome


def fair_share(kind: str, n_others: int, seconds: float, *, has_earned: bool = True) -> float:
    """Answers; no more than one member can ask for one after the other."""
    n_others = 1 if kind == NEW and has_earned else n_others
    asked_s = seconds - BEGAN_BEFORE_S
    return min(asked_s, asked_s * CAPACITY / (n_others + 1)) / ANSWER_S


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of the simulated clock")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| the honest member | the others | how many | fair share | answers | refused | begun again |")
    print("|---|---|---|---|---|---|---|")
    for has_earned, kind, n_others in itertools.product((True, False), KINDS, COUNTS):
        outcomes = [
            run(kind, n_others, arguments.seconds, seed, has_earned=has_earned)
            for seed in range(arguments.seeds)
        ]
        cells = [
            f"{statistics.median(figures):g}"
            for figures in (
                [each.n_answers for each in outcomes],
                [each.n_refused for each in outcomes],
                [each.n_given_up for each in outcomes],
            )
        ]
        fair = fair_share(kind, n_others, arguments.seconds, has_earned=has_earned)
        me = "has earned trust" if has_earned else "is a newcomer"
        print(f"| {me} | {kind} | {n_others} | {fair:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
