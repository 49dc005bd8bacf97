"""Small version of bench.nat_table: who reaches whom behind two kinds of NAT, and how."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common.namespaces import NoNamespaces
from bench.common.nat_networks import KINDS, homes, kind_named
from bench.nat_table import groups_of

pytestmark = pytest.mark.long

CHECKED = ("open", "port-restricted", "carrier-grade", "symmetric")


def test_each_kind_is_in_some_group_with_each_other_one() -> None:
    for size in (2, 3, 4, len(KINDS), 20):
        groups = groups_of(KINDS, size)
        together = {frozenset(pair) for group in groups for pair in itertools.combinations(group, 2)}
        assert together == {frozenset(pair) for pair in itertools.combinations(KINDS, 2)}
        assert {len(group) for group in groups} == {min(size, len(KINDS))}
    assert groups_of(KINDS[:1], 3) == [[KINDS[0]]]


@pytest.mark.slow
def test_nodes_behind_routers_reach_all_others_directly_by_a_hole_or_by_a_relay(tmp_path: Path) -> None:
    try:
        with homes([kind_named("symmetric")]):
            pass
    except NoNamespaces as error:
        pytest.skip(f"needs root, ip and nft: {error}")
    file = tmp_path / "ways.json"
    waits = ["--punch-s", "20", "--upgrade-s", "5"]
    command = [sys.executable, "-m", "bench.nat_table", "--kinds", *CHECKED, *waits, "--out", str(file)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    found = {(way["from"], way["to"]): way for way in json.loads(file.read_text())["ways"]}
    assert found.keys() == set(itertools.product(CHECKED, CHECKED))
    assert all(way["answers"] for way in found.values()), found
    for (here, there), way in found.items():
        if "open" in (here, there):
            assert way["control"] == "direct", found
        elif "symmetric" in (here, there):
            assert (way["control"], way["data"]) == ("relay", "relay"), found
        else:
            # The outer port of a carrier-grade NAT is known for the data port only.
            is_known = "carrier-grade" not in (here, there)
            assert way["control"] == ("hole" if is_known else "relay"), found
            # A busy machine may miss the moment, which comes again after a minute only.
            ways = {way["data"], found[there, here]["data"]}
            assert "hole" in ways <= {"hole", "relay"}, found
    assert found["open", "open"]["data"] == "direct"
