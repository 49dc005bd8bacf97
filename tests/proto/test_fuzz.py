"""Every decoder against bytes of a fixed seed: only its own refusals may come out, and never a hang.
`python -m bench.fuzz` does the same with a million of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from long_runs import part_or_whole

from bench.decoders.hostile_bytes import golden, mutated, noise, reshaped
from bench.decoders.table import PROTOCOL, all_targets
from bench.fuzz import hostile
from swarmllm_proto.errors import ProtocolError

N_PER_VECTOR = part_or_whole(60, 250)
N_NOISE = part_or_whole(750, 3000)
N_PER_TARGET = part_or_whole(50, 150)


def hostile_bytes(rng: random.Random) -> Iterator[bytes]:
    for _ in range(N_NOISE):
        yield noise(rng)
    for name, data in golden().items():
        for _ in range(N_PER_VECTOR):
            yield mutated(data, rng)
            if (other := reshaped(name, data, rng)) is not None:
                yield other


@pytest.mark.slow
def test_only_protocol_errors_escape_from_any_decoder() -> None:
    rng = random.Random(20261121)
    n_refused = dict.fromkeys(PROTOCOL, 0)
    n_accepted = dict.fromkeys(PROTOCOL, 0)
    for data in hostile_bytes(rng):
        for name, decode in PROTOCOL.items():
            try:
                decode(data)
            except ProtocolError as error:
                n_refused[name] += 1
                if not error.field:
                    pytest.fail(f"{name} names no field for {data!r}")
            except Exception as error:
                pytest.fail(f"{name} let {error!r} out for {data!r}")
            else:
                n_accepted[name] += 1
    assert all(n_refused.values()), n_refused
    # Mutations that stay legal prove that the corpus reaches behind the first check of every decoder.
    assert all(n_accepted.values()), n_accepted


@pytest.mark.slow
def test_only_their_refusals_escape_from_all_that_reads_bytes_of_others() -> None:
    rng = random.Random(20261121)
    foreign = golden()
    for name, target in all_targets().items():
        if name in PROTOCOL:
            continue
        for _ in range(N_PER_TARGET):
            data = hostile(target, foreign, rng)
            try:
                target.decode(data)
            except target.refusals:
                continue
            except Exception as error:
                pytest.fail(f"{name} let {error!r} out for {data!r}")
