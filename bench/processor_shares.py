"""How much of a worker's time a node gets that shares it with others who want to keep it out: the production
planner, and a clock.

    python -m bench.processor_shares [--seconds 60]

A worker has eight requests. One is of an honest node, the other seven of one member, of seven, or of new
identities, which count as one; and they compute prompts without end, steps of 16 rows (as many as pass for a
step that somebody waits for), or answers. A batch takes as long as its rows take as part of a prompt, and
3.5 rows more, so that one alone costs 4.5 (`docs/security.md`). The figure is how fast the honest node's
request goes on, as part of how fast it goes on alone; in the last column all requests take turns as if they
were one owner's. Its fair share is one part in as many owners as there are; an answer whose token goes around
a pipeline meanwhile cannot use more than it needs.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from dataclasses import dataclass

from swarmllm_workers.schedule.owner_shares import LONE_ROW, OWN, work_of
from swarmllm_workers.schedule.planner import Demand, Planner

ROW_S = 0.001
BATCH_S = (LONE_ROW - 1) * ROW_S
N_LAYERS = 12
N_OTHERS = 7
AROUND_S = 0.05
"""So long a token is on its way at other stages."""
ME = "me"
MINE = ("a prompt", "an answer", "an answer around a pipeline")
THEIRS = ("prompts", "steps of 16 rows", "answers")
OWNERS = {
    "one member": [f"member {0}"] * N_OTHERS,
    "seven members": [f"member {number}" for number in range(N_OTHERS)],
}


@dataclass
class Request:
    key: int
    owner: str
    kind: str
    ready_s: float = 0.0
    n_done: int = 0

    def demand(self) -> Demand:
        n_rows = {"prompts": 4096, "a prompt": 4096, "steps of 16 rows": 16}.get(self.kind, 1)
        return Demand(self.key, "a", n_rows, is_decode=n_rows <= 16, n_cells=1, owner=self.owner)


def rows_per_s(mine: str, theirs: str, owners: list[str], seconds: float, me: str = ME) -> float:
    """Of the honest node's request."""
    planner = Planner()
    requests = [Request(0, me, mine)]
    requests += [Request(number, owner, theirs) for number, owner in enumerate(owners, 1)]
    now_s = 0.0
    while now_s < seconds:
        ready = [each for each in requests if each.ready_s <= now_s]
        if not ready:
            now_s = min(each.ready_s for each in requests)
            continue
        demands = [each.demand() for each in ready]
        is_decode = {demand.key: demand.is_decode for demand in demands}
        for batch in planner.schedule(demands):
            planner.postprocess(batch)
            took_s, used = BATCH_S + batch.n_rows * ROW_S, defaultdict[str, float](float)
            now_s += took_s
            for share in batch.shares:
                request = requests[share.key]
                request.n_done += share.n_rows
                used[request.owner] += work_of(share.n_rows, N_LAYERS, is_step=is_decode[share.key])
                request.ready_s = now_s + (AROUND_S if request.kind.endswith("pipeline") else 0.0)
            n_decodes = sum(is_decode[share.key] for share in batch.shares)
            planner.ran(n_decodes, len(batch.shares) - n_decodes, took_s)
            if len(ready) > 1:
                planner.charge(used)
    return requests[0].n_done / seconds


def part(mine: str, theirs: str, owners: list[str], seconds: float, me: str = ME) -> float:
    """Of the speed that it has alone."""
    return rows_per_s(mine, theirs, owners, seconds, me) / rows_per_s(mine, theirs, [], seconds, me)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of the simulated clock")
    seconds = parser.parse_args().seconds
    print("| the node's | the others' | whose they are | fair share | it gets | own users get | by turns |")
    print("|---|---|---|---|---|---|---|")
    for (whose, owners), mine, theirs in itertools.product(OWNERS.items(), MINE, THEIRS):
        fair = 1 / (len(set(owners)) + 1)
        gets, own = (part(mine, theirs, owners, seconds, me) for me in (ME, OWN))
        as_one = part(mine, theirs, [OWN] * N_OTHERS, seconds, OWN)
        figures = " | ".join(f"{figure:.2f}" for figure in (fair, gets, own, as_one))
        print(f"| {mine} | {theirs} | {whose} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
