"""The changes that `python -m bench.mutants` makes parse, come one at a time, and follow from the seed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.mutants import Verdict, drawn_mutants, report
from bench.mutation.changes import Mutation, mutations, sampled
from bench.mutation.coverage import TestRun as RecordedTest
from bench.mutation.coverage import recorded
from bench.mutation.nearest_tests import test_map as map_of_tests
from bench.mutation.runs import FILE_S, NEAREST_S, RUN_S, choice

ROOT = Path(__file__).parents[2]
SOURCE = dedent('''
    """A text: 1 < 2."""
    LIMIT = 3

    def admit(self, size: int = 4, *, name: str = "ä") -> bool:
        """One < two."""
        if self.held + size > LIMIT and not self.is_closed:
            _log.info("%d", size + 5)
            raise TooMuch(f"{size} > {LIMIT + 6}")
        self.held += size
        await trio.lowlevel.checkpoint()
        self.tell(min(size, 7))
        return True
''')


def named(source: str) -> set[str]:
    return {f"{x.before} -> {x.after}" for x in mutations(source)}


def test_limits_counters_conditions_and_statements_are_changed() -> None:
    condition = "self.held + size > LIMIT and not self.is_closed"
    assert named(SOURCE) == {
        f"{condition} -> (not (self.held + size > LIMIT and (not self.is_closed)))",
        f"{condition} -> (self.held + size > LIMIT or not self.is_closed)",
        f"{condition} -> (self.held + size > LIMIT)",
        f"{condition} -> (not self.is_closed)",
        "self.held + size > LIMIT -> (self.held + size >= LIMIT)",
        "self.held + size -> (self.held - size)",
        "not self.is_closed -> bool(self.is_closed)",
        'raise TooMuch(f"{size} > {LIMIT + 6}") -> pass',
        "self.held += size -> pass",
        "self.held += size -> self.held -= size",
        "self.tell(min(size, 7)) -> pass",
        "min -> max",
        "7 -> 8",
        "True -> False",
    }


@pytest.mark.parametrize(
    "path",
    [
        "swarmllm/swarm/byte_budget.py",
        "swarmllm/pipeline/stage/inbox.py",
        "workers/swarmllm_workers/engine/slots.py",
    ],
)
def test_a_mutation_changes_one_place_and_still_parses(path: str) -> None:
    source = (ROOT / path).read_text()
    found = mutations(source)
    unchanged = ast.dump(ast.parse(source))
    assert found
    for mutation in found:
        changed = mutation.applied(source)
        assert ast.dump(ast.parse(changed)) != unchanged, mutation.name
        assert changed.startswith(source.encode()[: mutation.start].decode())
        assert changed.endswith(source.encode()[mutation.end :].decode())
    assert len({x.name for x in found}) == len(found)


def test_the_changes_of_a_seed_are_always_the_same() -> None:
    first, again, other = (drawn_mutants(seed, "swarmllm/scheduling") for seed in (1, 1, 2))
    assert [x.name for x in first] == [x.name for x in again]
    assert [x.name for x in first] != [x.name for x in other]
    assert {x.name for x in first} == {x.name for x in other}


def test_rooms_take_turns_and_a_new_change_leaves_the_order_of_the_others() -> None:
    few = [Mutation("f", "bound", i, 0, 0, f"x < {i}", f"x <= {i}") for i in range(20)]
    more = [*few, Mutation("g", "bound", 1, 0, 0, "y < 1", "y <= 1")]
    drawn = sampled({"a": few[:10], "b": few[10:]}, 3)
    assert all(drawn[i] in few[:10] and drawn[i + 1] in few[10:] for i in range(0, 20, 2))
    alone, beside = sampled({"a": few}, 3), sampled({"a": more}, 3)
    assert [x for x in beside if x.function == "f"] == alone


def test_the_nearest_tests_come_first_and_none_starts_a_process() -> None:
    tests = map_of_tests(ROOT)
    nearest = tests.nearest("swarmllm.swarm.byte_budget")
    assert nearest[0] == "tests/swarm/test_byte_budget.py"
    assert "tests/swarm/test_router_contract.py" in tests.nearest("swarmllm.swarm.libp2p_router")
    assert "tests/workers/test_worker_process.py" not in tests.tests


seconds = st.integers(0, int(6 * RUN_S)).map(lambda quarters: quarters / 4)


@given(st.lists(st.lists(seconds, max_size=8), max_size=12))
def test_the_nearest_quick_tests_are_run_and_then_the_quickest_of_all(files: list[list[float]]) -> None:
    runs = [
        [RecordedTest(f"{i}::{j}", took_s, {}) for j, took_s in enumerate(file)]
        for i, file in enumerate(files)
    ]
    chosen = choice(runs)
    names = [x.test for x in chosen]
    assert len(set(names)) == len(names)
    assert bool(chosen) == any(files)
    assert [int(x.partition("::")[0]) for x in names] == sorted(int(x.partition("::")[0]) for x in names)
    assert sum(x.took_s for x in chosen) <= RUN_S or len(chosen) == 1
    left = [x for file in runs for x in file if x not in chosen]
    spare_s = RUN_S - sum(x.took_s for x in chosen)
    assert all(x.took_s > spare_s for x in left)
    if runs and runs[0] and sum(files[0]) <= min(FILE_S, NEAREST_S):
        assert all(x in chosen for x in runs[0]), "of the nearest file all"


def test_a_hang_counts_as_noticed_and_is_listed_apart() -> None:
    statuses = ("killed", "killed", "timed out", "survived", "not judged")
    text = report([Verdict(f"m:{i}", "swarm/data", i, "bound", x) for i, x in enumerate(statuses)])
    assert "| swarm/data | 4 | 2 | 1 | 1 | 0 |" in text
    assert "3 of 4 (75.0%)" in text
    assert "Survived:\n\n- line 3: `m:3`" in text
    assert "Timed out:\n\n- `m:2`" in text
    assert "Not judged:\n\n- `m:4`" in text


def test_the_recorder_tells_which_lines_each_test_that_passes_runs(tmp_path: Path) -> None:
    (tmp_path / "limits.py").write_text("def bounded(n):\n    if n > 3:\n        return 3\n    return n\n")
    (tmp_path / "test_limits.py").write_text(
        "from limits import bounded\n\n"
        "def test_below():\n    assert bounded(1) == 1\n\n"
        "def test_above():\n    assert bounded(9) == 3\n\n"
        "def test_wrong():\n    assert bounded(9) == 9\n"
    )
    program = (
        "import sys, pytest; from pathlib import Path; from bench.mutation.coverage import LineRecorder\n"
        "tree = Path(sys.argv[1])\n"
        "recorder = LineRecorder(tree, ['limits.py'], tree / 'lines', 60, 60)\n"
        "pytest.main(['-q', '-p', 'no:cacheprovider', str(tree)], plugins=[recorder])\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    below, above = recorded(tmp_path / "lines")
    assert (below.test.rpartition("::")[2], above.test.rpartition("::")[2]) == ("test_below", "test_above")
    assert (below.lines, above.lines) == (
        {"limits.py": frozenset({2, 4})},
        {"limits.py": frozenset({2, 3})},
    )
    assert above.runs("limits.py", 3, 3)
    assert not below.runs("limits.py", 3, 3)
