"""Do the tests notice a wrong line? `python -m bench.mutants [--n 200] [--seed S] [--only MODULE]`.

Changes one line of the bookkeeping and limits at a time (bench/mutation/changes.py) in a private copy of the
tree, runs the tests that run this line (bench/mutation/coverage.py) of the test files nearest to it
(bench/mutation/nearest_tests.py), and says which changes no test noticed. A run that hangs past its deadline
counts as noticed and is listed apart; time in which other programs had the processor does not count. A run
that they slowed down too much is tried once more, and then listed as not judged.
`--list` only shows what would be changed.
`--resume` goes on where the last run with this seed stopped; `--survivors` tries those that survived it
again, to see whether a new test notices them. bench/mutants_equivalent.json has the survivors that change
nothing one could observe, each with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.common.figures import RESULTS, machine
from bench.mutation.changes import Mutation, mutations, sampled
from bench.mutation.runs import MutantRuns

ROOT = Path(__file__).parent.parent
RESULT = RESULTS / "mutants.json"
EQUIVALENT = Path(__file__).parent / "mutants_equivalent.json"
LINK_WORKS = tuple(f"schedule/{x}" for x in ("forwards", "lone_steps", "ring_work", "window_work"))
"""How workers run what came by links."""
ROOMS = {
    "swarm/byte_budget": ["swarmllm/swarm/byte_budget.py"],
    "swarm/peers": ["swarmllm/swarm/peers/*.py"],
    "swarm/membership": ["swarmllm/swarm/membership/*.py"],
    "swarm/data": ["swarmllm/swarm/data/*.py"],
    "swarm/records": ["swarmllm/swarm/records/*.py"],
    "swarm/discovery": ["swarmllm/swarm/discovery/**/*.py"],
    "swarm/libp2p/request_protocol": ["swarmllm/swarm/libp2p/request_protocol.py"],
    "pipeline/stage": ["swarmllm/pipeline/stage/*.py"],
    "pipeline/origin": ["swarmllm/pipeline/origin/*.py"],
    "pipeline/repair": ["swarmllm/pipeline/repair/*.py"],
    "pipeline/route": ["swarmllm/pipeline/route/*.py"],
    "pipeline/vision": ["swarmllm/pipeline/vision/*.py"],
    "node": [
        f"swarmllm/node/{x}.py"
        for x in (
            "announcing/record_changes",
            "placing/accepted_shares",
            "placing/share_book",
            "remembered_loads",
        )
    ],
    "log_limit": ["swarmllm/log_limit.py"],
    "supervision": ["swarmllm/supervision/*.py"],
    "scheduling/tiers": ["swarmllm/scheduling/tiers.py"],
    "api/http/limits": ["swarmllm/api/http/limits.py"],
    "transfer": ["swarmllm/transfer/fetch_plan.py", "swarmllm/transfer/uploads.py"],
    "workers/ring": ["workers/swarmllm_workers/ring/*.py"],
    "workers/schedule": [
        f"workers/swarmllm_workers/{x}.py" for x in ("engine/slots", "schedule/planner", *LINK_WORKS)
    ],
    "workers/cache": ["workers/swarmllm_workers/cache/*.py"],
}


@dataclass(frozen=True)
class Mutant:
    """One change of one module, to be judged."""

    room: str
    path: str
    """In the tree."""
    mutation: Mutation

    @property
    def module(self) -> str:
        parts = Path(self.path.removeprefix("workers/")).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def name(self) -> str:
        return f"{self.module}:{self.mutation.name}"


@dataclass(frozen=True)
class Verdict:
    """What became of one change."""

    name: str
    room: str
    line: int
    operator: str
    status: str
    """`killed`, `timed out`, `survived` or `not judged`."""
    by: str = ""
    """The first test that noticed it."""


def main() -> int:
    options = _options()
    drawn = drawn_mutants(options.seed, options.only)[: options.n]
    if options.list:
        for mutant in drawn:
            print(f"{mutant.path}:{mutant.mutation.line}: {mutant.mutation.operator}: {mutant.mutation.name}")
        return 0
    verdicts = _judged_before(options.seed) if options.resume or options.survivors else {}
    if options.survivors:
        survived = {x.name for x in verdicts.values() if x.status == "survived"} - equivalent().keys()
        left = [mutant for mutant in drawn if mutant.name in survived]
    else:
        left = [mutant for mutant in drawn if mutant.name not in verdicts]
    work = Path(tempfile.mkdtemp(prefix="swarmllm-mutants-"))
    stop_s = time.monotonic() + 60 * options.minutes
    try:
        runs = MutantRuns(ROOT, work, options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            # Most changes are noticed by the nearest tests, before the lines of all the others are recorded.
            judged = set[str]()
            for nearest_only in (True, False):
                judge = partial(_verdict, runs, stop_s=stop_s, nearest_only=nearest_only)
                for verdict in pool.map(judge, [x for x in left if x.name not in judged]):
                    if verdict is not None:
                        judged.add(verdict.name)
                        verdicts[verdict.name] = verdict
                        print(f"{verdict.status}: {verdict.name} [{verdict.by}]", flush=True)
                        _write(options, verdicts)
                print(f"{len(judged)} of {len(left)} are judged", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(report(verdicts.values()))
    return 0


def drawn_mutants(seed: int, only: str = "") -> list[Mutant]:
    """Every mutant of the rooms, or of the modules whose path contains `only`, in the order of the seed."""
    rooms: dict[str, list[Mutant]] = {}
    for room, patterns in ROOMS.items():
        for path in sorted({x for pattern in patterns for x in ROOT.glob(pattern)}):
            name = str(path.relative_to(ROOT))
            if only in name:
                found = [Mutant(room, name, x) for x in mutations(path.read_text())]
                rooms.setdefault(room, []).extend(found)
    return sampled(rooms, seed)


def equivalent() -> dict[str, str]:
    """Name of a mutant -> why nobody could notice it."""
    return json.loads(EQUIVALENT.read_text())


def report(verdicts: Collection[Verdict]) -> str:
    """A table by room, the share killed, and the survivors, those that are not equivalent first. What was not
    judged is only listed."""
    not_judged = [x for x in verdicts if x.status == "not judged"]
    verdicts = [x for x in verdicts if x.status != "not judged"]
    excused = equivalent()
    lines = [
        "| changed | mutants | killed | timed out | survived | of these equivalent |",
        "|---|---|---|---|---|---|",
    ]
    rows = [*((room, [x for x in verdicts if x.room == room]) for room in ROOMS), ("all", verdicts)]
    for room, some in rows:
        if some:
            counts = Counter(x.status for x in some)
            n_excused = sum(x.status == "survived" and x.name in excused for x in some)
            numbers = [len(some), counts["killed"], counts["timed out"], counts["survived"], n_excused]
            lines.append(f"| {room} | " + " | ".join(map(str, numbers)) + " |")
    survivors = [x for x in verdicts if x.status == "survived"]
    n_excused = sum(x.name in excused for x in survivors)
    n_killed = len(verdicts) - len(survivors)
    if verdicts:
        share, without = n_killed / len(verdicts), n_killed / max(1, len(verdicts) - n_excused)
        counted = f"{n_killed} of {len(verdicts)} ({share:.1%})"
        lines += ["", f"Noticed: {counted}; {without:.1%} without the equivalent ones."]
    open_ones = [f"- line {x.line}: `{x.name}`" for x in survivors if x.name not in excused]
    hung = [f"- `{x.name}`" for x in verdicts if x.status == "timed out"]
    known = [f"- `{x.name}`: {excused[x.name]}" for x in survivors if x.name in excused]
    unknown = [f"- `{x.name}`" for x in not_judged]
    lists = {"Survived": open_ones, "Timed out": hung, "Equivalent": known, "Not judged": unknown}
    for title, entries in lists.items():
        if entries:
            lines += ["", f"{title}:", "", *entries]
    return "\n".join(lines)


def _verdict(runs: MutantRuns, mutant: Mutant, *, stop_s: float, nearest_only: bool) -> Verdict | None:
    """None: there is no time left, or it takes more than the nearest tests to say."""
    if time.monotonic() > stop_s:
        return None
    run = runs.judge(mutant.path, mutant.module, mutant.mutation, nearest_only=nearest_only)
    if run.status == "not judged":
        run = runs.judge(mutant.path, mutant.module, mutant.mutation, nearest_only=nearest_only)
    if nearest_only and run.status == "passed":
        return None
    status = {"passed": "survived", "failed": "killed"}.get(run.status, run.status)
    mutation = mutant.mutation
    return Verdict(mutant.name, mutant.room, mutation.line, mutation.operator, status, run.first_failure)


def _judged_before(seed: int) -> dict[str, Verdict]:
    if not RESULT.exists():
        return {}
    result = json.loads(RESULT.read_text())
    if result["seed"] != seed:
        sys.exit(f"{RESULT} is of seed {result['seed']}")
    return {x["name"]: Verdict(**x) for x in result["mutants"] if x["status"] != "not judged"}


def _write(options: argparse.Namespace, verdicts: dict[str, Verdict]) -> None:
    command = f"python -m bench.mutants --n {options.n} --seed {options.seed}"
    result = {
        "command": command,
        "machine": machine(),
        "seed": options.seed,
        "mutants": [asdict(x) for x in verdicts.values()],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(f"`{command}` on {machine()}\n\n{report(verdicts.values())}\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=200, help="how many changes to judge (default: 200)")
    parser.add_argument("--seed", type=int, default=12, help="decides which (default: 12)")
    parser.add_argument("--only", default="", metavar="MODULE", help="only files whose path contains this")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, each in a copy of its own (default: 1)"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after this long")
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    parser.add_argument("--resume", action="store_true", help="keep what the last run with this seed judged")
    parser.add_argument(
        "--survivors", action="store_true", help="judge only the survivors of the last run again"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
