"""The count of cells, against a plain simulation in which every cell is an object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.engine.slots import Cells

N_SEQUENCES = 4
SEQUENCE = st.integers(0, N_SEQUENCES - 1)
STEP = st.one_of(
    st.tuples(st.just("append"), SEQUENCE, st.integers(0, 5)),
    st.tuples(st.just("truncate"), SEQUENCE, st.integers(0, 8)),
    st.tuples(st.just("share"), st.tuples(SEQUENCE, SEQUENCE), st.integers(0, 8)),
)


@given(st.lists(STEP, max_size=40))
def test_what_is_shared_counts_once(steps: list[tuple[str, int | tuple[int, int], int]]) -> None:
    cells = Cells(N_SEQUENCES)
    plain: list[list[object]] = [[] for _ in range(N_SEQUENCES)]
    for what, which, n in steps:
        if isinstance(which, tuple):
            source, target = which
            if source != target and not plain[target]:
                cells.share(source, target, n)
                plain[target] = plain[source][:n]
        elif what == "append":
            cells.append(which, n)
            plain[which] += [object() for _ in range(n)]
        else:
            cells.truncate(which, n)
            del plain[which][n:]
        assert cells.lengths == [len(rows) for rows in plain]
        assert cells.n_used == len({id(row) for rows in plain for row in rows})
        for sequence, rows in enumerate(plain):
            others = {id(row) for i, each in enumerate(plain) if i != sequence for row in each}
            assert cells.n_alone(sequence) == len({id(row) for row in rows} - others)
