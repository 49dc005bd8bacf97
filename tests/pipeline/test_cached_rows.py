"""Which nodes need not compute the beginning of a prompt, and what that does to routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_trust import FakeTrust

from swarmllm.pipeline.prefix.cached_rows import CachedRows
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs, Workload
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, kept_root
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.swarm import KeptPrefix, NodeRecord, PrefixCacheAnnounce

B = BLOCK_TOKENS
KEY = "5e" * 32
TOKENS = np.arange(10 * B + 5, dtype=np.int32)
ENTRY: Any = SimpleNamespace(model_id=ModelId("ab" * 32), manifest=SimpleNamespace(n_layers=12))
HASHES = extend_block_hashes(kept_root(KEY, ENTRY.model_id, ENTRY.manifest.n_layers), TOKENS)
ME, NEAR, FAR, LIAR = (node_id_named(name) for name in ("me", "near", "far", "liar"))


@dataclass
class Kept:
    prefixes: Mapping[ModelId, tuple[KeptPrefix, ...]]

    def kept_prefixes(self) -> Mapping[ModelId, tuple[KeptPrefix, ...]]:
        return self.prefixes


def known(n_here: int = 0, *, sends_tokens: bool = True, **n_said: int) -> dict[str, int]:
    """Rows by name of the node; `n_said`: blocks that each announces."""
    ids = {"me": ME, "near": NEAR, "far": FAR, "liar": LIAR}
    registry = Registry(ME, FakeTrust(lambda node_id: node_id != LIAR, 0.5), share_min=1.0)
    for name, n in n_said.items():
        said = PrefixCacheAnnounce(
            model_id=ENTRY.model_id, prefixes=tuple(KeptPrefix(HASHES[i - 1], i) for i in {1, n})
        )
        registry.apply(ids[name], encode_record(NodeRecord(node_id=ids[name], prefix_caches=(said,))))
    registry.set_reachable({NEAR, FAR, LIAR})
    kept = {ENTRY.model_id: (KeptPrefix(HASHES[n_here - 1], n_here),)} if n_here else {}
    cached_rows = CachedRows(ME, registry, Kept(kept), sends_tokens=sends_tokens, key=KEY)
    found = cached_rows.of(ENTRY, TOKENS)
    return {name: found[node_id] for name, node_id in ids.items() if node_id in found}


def test_each_node_has_the_longest_that_it_announces_and_this_one_what_it_can_fetch() -> None:
    assert known() == {}
    assert known(near=10, far=4) == {"me": 10 * B, "near": 10 * B, "far": 4 * B}


def test_what_is_kept_here_counts_here() -> None:
    assert known(7) == {"me": 7 * B}
    assert known(7, far=4) == {"me": 7 * B, "far": 4 * B}
    assert known(3, far=4) == {"me": 4 * B, "far": 4 * B}


def test_a_node_that_gets_no_tokens_does_not_know_the_prompt_by_the_name_that_it_announced() -> None:
    """Rows come to it under names that mean something here only, so it would compute all of them."""
    assert known(7, near=10, sends_tokens=False) == {"me": 10 * B}
    assert known(near=4, sends_tokens=False) == {"me": 4 * B}


def test_nobody_counts_who_is_not_trusted() -> None:
    assert known(liar=10) == {}


@pytest.mark.parametrize(("known_there", "is_there"), [(0, False), (500, True), (5000, True)])
def test_a_node_that_knows_the_prompt_is_worth_the_way(known_there: int, is_there: bool) -> None:
    speed = NodeSpeed(decode_s=0.001, prefill_s=0.001)
    inputs: Any = RouteInputs(
        ME, Workload(640, 8), {ME: speed, NEAR: speed}, cached_rows={NEAR: known_there} if known_there else {}
    )
    assert (inputs.layer_s(NEAR) < inputs.layer_s(ME)) is is_there
    assert inputs.layer_s(NEAR) >= 8 * speed.decode_s
