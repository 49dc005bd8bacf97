"""Chooses a kernel for each number of rows from measured times: pure.

Nothing here knows ggml or a clock. The order of the measurement (`race`) and the choice (`choose`) are
functions of what `run` and `now` give.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean
from typing import Final

ROWS_MAX: Final = 7
"""Batches of up to so many rows give each row the bits that it has alone."""


IS_ARM: Final = platform.machine() in ("aarch64", "arm64")


class MatrixType(IntEnum):
    """Types of matrices that `small_batches.c` multiplies with, numbered as ggml does."""

    Q4_0 = 2
    Q5_0 = 6
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    MXFP4 = 39

    @property
    def is_k_quant(self) -> bool:
        """Ours are in `k_quants.c`: blocks of 256 numbers, and columns of Q8_K."""
        return self in (MatrixType.Q4_K, MatrixType.Q5_K, MatrixType.Q6_K, MatrixType.IQ4_XS)

    @property
    def tiled_from(self) -> int:
        """The number of rows from which ggml has tiles."""
        return 8 if self.is_k_quant else 2

    @property
    def tiles_differ(self) -> bool:
        """Whether ggml's tiles have other bits than its dot products."""
        return IS_ARM or self.is_k_quant or self in (MatrixType.IQ4_NL, MatrixType.MXFP4)


class Way(IntEnum):
    """The numbers are those of `small_batches.c`."""

    DOTS = 0
    """ggml's dot products, row by row."""
    TILES = 1
    """ggml's tiles of four by four."""
    AVX2 = 2
    """Ours: two rows of the matrix at a time, or four with one column, with prefetching of the next ones. Of
    other types than Q8_0 one row, without."""
    AVX2_STREAMED = 3
    """Ours: one row of the matrix after the other, with prefetching of what comes next in this order."""
    AVX512 = 4
    """Ours: eight rows of the matrix at a time, of K-quants two, with prefetching."""
    IN_ORDER = 5
    """Ours: one row of the matrix after the other, with AVX-512 and no prefetching."""
    PAIRS = 6
    """Ours: two rows of the matrix in a register, with AVX-512; types in blocks of 32 only."""
    NEON = 7
    """Ours on ARM: one row of the matrix after the other, without prefetching."""
    PANELS_AVX2 = 8
    """Ours: some rows of the matrix, unpacked once for all rows of a large batch."""
    PANELS_VNNI = 9
    """The same, with the same bits, with AVX-512."""
    PANELS_AMX = 10
    """The same with the matrix unit."""
    PANELS_FEW = 11
    """The same with AVX-512, unpacked for every eight rows of a batch of any size; Q4_0 only."""

    @property
    def is_ggmls(self) -> bool:
        return self <= Way.TILES

    @property
    def has_own_sums(self) -> bool:
        """Ours, with other bits than dot products."""
        return self >= Way.PANELS_AVX2


@dataclass(frozen=True)
class RowClass:
    """Numbers of rows that are computed in one way, and the one of them that is measured: the first is the
    worst for kernels that take eight rows at a time."""

    first: int
    last: int


ROW_CLASSES: Final = (
    *(RowClass(n, n) for n in range(1, 9)),
    RowClass(9, 16),
    RowClass(17, 32),
    RowClass(33, 63),
    RowClass(64, 2**31 - 1),
)
"""As `class_of` of `small_batches.c` has them."""

PANEL_ROWS_MIN: Final = ROW_CLASSES[-1].first
"""Attention has other bits than that of single rows from here on, too."""
_WITH_AVX512: Final = {Way.AVX512, Way.IN_ORDER, Way.PAIRS}
_OF_PANELS: Final = frozenset(
    {MatrixType.Q4_0, MatrixType.Q5_0, MatrixType.Q8_0, MatrixType.Q4_K, MatrixType.Q5_K, MatrixType.Q6_K}
)
"""Types that `panels.c` multiplies with: K-quants with AVX2, all with VNNI but Q6_K, which has three digits
there and is as fast with AVX2, and all with the matrix unit."""
_SUMMED_BY_BLOCK: Final = frozenset({MatrixType.Q4_0})
"""Types whose products may come from panels in batches of any size, if they do in all: each row has the bits
then that it has alone. ggml, too, adds up whole blocks of them where it rearranges them for AMX. (It does
with Q8_0 as well, of which single rows took up to 1.6 times as long from panels on a Xeon.)"""
_MATRIX_UNIT_ROWS_MIN: Final = 17
"""The first class of which every number of rows fills what the matrix unit computes at once."""
PANEL_LOSS_MAX: Final = 1.25
"""Panels are taken where they take no more than so many times what the fastest other way takes, for batches
of any size on average. Most take half of it or less, so a clock that other programs disturb does not decide
it: two workers of one machine should choose alike, because panels have bits of their own."""
GAIN_MIN: Final = 0.95
"""A way is taken instead of ggml's own where it takes less than this share of its time: the rest is a tie."""
HOPELESS: Final = 1.5
"""A way that takes so many times what the best one takes is not measured again, nor taken for its bits."""
ROUNDS_MIN: Final = 3
"""Of every way, whatever the first ones took: another program may have run in one of them."""
ROUNDS_MAX: Final = 8
SINGLE_RUNS: Final = 4
"""Of each way in a round, of a single row: most products of a lone request are such, and a run is short."""

Times = Mapping[Way, int]
"""Nanoseconds per product."""


@dataclass(frozen=True)
class RowChoice:
    """For one class of numbers of rows."""

    rows: RowClass
    way: Way
    ggml_ns: int
    """Per product, of ggml's fastest way that has the right bits."""
    ours_ns: int | None
    """Of our fastest; None where none has the right bits."""

    @property
    def chosen_ns(self) -> int:
        """Per product, of the way that was chosen, or one that is hardly slower."""
        return self.ggml_ns if self.way.is_ggmls or self.ours_ns is None else self.ours_ns


NEVER_LARGE: Final = PANEL_ROWS_MIN
"""No batch of fewer rows than a large one takes longer than it."""


LARGE_MARGIN: Final = 1.1
"""A large batch takes so many times what its slices say, at the most, beside what attention is faster: on a
Xeon with AMX 64 rows took as long as 33 by themselves, and slices had said 28 to 34."""


def large_batch_from(matrices: Iterable[tuple[int, Sequence[RowChoice]]]) -> int:
    """The least number of rows of which the products of a model take longer than of PANEL_ROWS_MIN rows, as
    all larger ones do; NEVER_LARGE where there is none. `matrices`: for each kind of them, how many bytes of
    it the model has, and what was chosen for slices of the same size, for each of ROW_CLASSES."""
    totals = [0.0] * len(ROW_CLASSES)
    for n_bytes, choices in matrices:
        totals = [total + n_bytes * each.chosen_ns for total, each in zip(totals, choices, strict=True)]
    *fewer, large = totals
    least = NEVER_LARGE
    for rows, total in reversed(list(zip(ROW_CLASSES[:-1], fewer, strict=True))):
        # As many rows of this class as take so long, by the number of which that is known.
        n_rows = math.floor(LARGE_MARGIN * large * rows.first / total) + 1 if total else NEVER_LARGE
        if n_rows > rows.last:
            break
        least = max(n_rows, rows.first)
    return least


def ggmls_own(kind: MatrixType, n_rows: int) -> Way:
    """What ggml does by itself."""
    return Way.DOTS if n_rows < kind.tiled_from else Way.TILES


def reference(kind: MatrixType, n_rows: int) -> Way:
    """The way whose bits count: in small batches, a row's are those that it has alone. Where ggml's tiles
    have others, those of our products are so in every batch."""
    return Way.DOTS if n_rows <= ROWS_MAX or kind.tiles_differ else Way.TILES


def may_differ(kind: MatrixType, way: Way, n_rows: int) -> bool:
    """Whether a way may be chosen though its bits are not the reference's: ggml's tiles with other bits in
    large batches, and panels in larger ones, in which no bits are promised."""
    if way.has_own_sums:
        return n_rows >= PANEL_ROWS_MIN
    return kind.tiles_differ and way == Way.TILES and n_rows > ROWS_MAX


def ways_of(kind: MatrixType, n_rows: int, ways: Collection[Way]) -> list[Way]:
    """Those of `ways` in which products of this type are computed with so many rows."""
    left_out = _WITH_AVX512 - _ways_with_avx512(kind)
    if kind not in _SUMMED_BY_BLOCK:
        left_out.add(Way.PANELS_FEW)
    is_in_all = Way.PANELS_FEW in ways and kind in _SUMMED_BY_BLOCK and n_rows >= _MATRIX_UNIT_ROWS_MIN
    if (n_rows < PANEL_ROWS_MIN and not is_in_all) or kind not in _OF_PANELS:
        left_out |= {Way.PANELS_AVX2, Way.PANELS_VNNI, Way.PANELS_AMX}
    elif not kind.is_k_quant:
        left_out.add(Way.PANELS_AVX2)
    elif kind == MatrixType.Q6_K:
        left_out.add(Way.PANELS_VNNI)
    return [
        way for way in sorted(ways) if way not in left_out and (way != Way.TILES or n_rows >= kind.tiled_from)
    ]


def _ways_with_avx512(kind: MatrixType) -> set[Way]:
    """Ours, for small batches."""
    if kind == MatrixType.IQ4_XS:
        return set()
    if kind.is_k_quant:
        return {Way.AVX512, Way.IN_ORDER}
    return set(_WITH_AVX512) if kind == MatrixType.Q8_0 else {Way.PAIRS}


def choose_all(
    kind: MatrixType, times: Mapping[RowClass, Times], unequal: Mapping[RowClass, Collection[Way]]
) -> tuple[RowChoice, ...]:
    """For every class, as `choose` does, but panels in all of them where these are possible in all, nowhere
    take HOPELESS times what is chosen else, and not PANEL_LOSS_MAX times that on average: a row has the same
    bits in every batch then, too."""
    choices = tuple(choose(kind, rows, times[rows], unequal[rows]) for rows in ROW_CLASSES)
    from_panels = []
    for choice in choices:
        of_rows = times[choice.rows]
        panels = _panels_of(of_rows) - set(unequal[choice.rows])
        best = min(panels, key=lambda way: (of_rows[way], way), default=None)
        if best is None:
            return choices
        from_panels.append(RowChoice(choice.rows, best, choice.ggml_ns, of_rows[best]))
    losses = [
        times[each.rows][each.way] / times[each.rows][other.way]
        for each, other in zip(from_panels, choices, strict=True)
    ]
    is_slow = max(losses) > HOPELESS or fmean(losses) > PANEL_LOSS_MAX
    return choices if is_slow else tuple(from_panels)


def choose(kind: MatrixType, rows: RowClass, times: Times, unequal: Collection[Way] = ()) -> RowChoice:
    """`times`: of every way that was measured, the reference among them. `unequal`: ways whose bits differ
    from those of the reference: never chosen where another has these. Ties go to ggml, and among its ways to
    what it does by itself; but to ours where ggml's bits are not those of single rows. Panels only in
    batches in which no bits are promised."""
    left_out = set(unequal) | (set() if rows.first >= PANEL_ROWS_MIN else _panels_of(times))
    allowed = {way: time_ns for way, time_ns in times.items() if way not in left_out}
    if not any(way.is_ggmls for way in allowed):
        return _choose_ours(kind, rows, times, allowed)
    own = ggmls_own(kind, rows.first)
    own = own if own in allowed else next(way for way in sorted(allowed) if way.is_ggmls)
    theirs = _faster(allowed, own, [way for way in allowed if way.is_ggmls])
    ours = [way for way in allowed if not way.is_ggmls and not way.has_own_sums]
    best = _faster(allowed, theirs, ours)
    if ours and may_differ(kind, theirs, rows.first):
        best = _faster(allowed, min(ours, key=lambda way: (allowed[way], way)), [theirs])
    best = _panels(allowed) or best
    ggml_ns = min(time_ns for way, time_ns in allowed.items() if way.is_ggmls)
    ours_ns = min((time_ns for way, time_ns in allowed.items() if not way.is_ggmls), default=None)
    return RowChoice(rows, best, ggml_ns, ours_ns)


def _panels_of(ways: Collection[Way]) -> set[Way]:
    return {way for way in ways if way.has_own_sums}


def _panels(times: Times) -> Way | None:
    """The fastest of them, which all have the same bits, where they are not much slower than all others."""
    panels = min((way for way in times if way.has_own_sums), key=lambda way: (times[way], way), default=None)
    others = min(time_ns for way, time_ns in times.items() if not way.has_own_sums)
    return panels if panels is not None and times[panels] <= PANEL_LOSS_MAX * others else None


def _choose_ours(kind: MatrixType, rows: RowClass, times: Times, allowed: Times) -> RowChoice:
    """Where ggml has other bits in this batch than for a row alone: it multiplies two at a time (i8mm)."""
    best = min(allowed, key=lambda way: (allowed[way], way), default=reference(kind, rows.first))
    ggml_ns = min(time_ns for way, time_ns in times.items() if way.is_ggmls)
    return RowChoice(rows, best, ggml_ns, allowed.get(best))


def _faster(times: Times, incumbent: Way, others: Collection[Way]) -> Way:
    """The fastest of the others where it is faster by more than a tie, else the incumbent."""
    fastest = min(others, key=lambda way: (times[way], way), default=incumbent)
    return fastest if times[fastest] < GAIN_MIN * times[incumbent] else incumbent


def race(
    kind: MatrixType,
    ways: Collection[Way],
    run: Callable[[int, Way], int],
    now_s: Callable[[], float],
    budget_s: float,
) -> dict[RowClass, dict[Way, int]]:
    """The least nanoseconds of each way, for each class. Ways take turns. The first rounds are always run
    whole, later ones leave out what is hopeless and end with the budget."""
    best: dict[RowClass, dict[Way, int]] = {rows: {} for rows in ROW_CLASSES}
    ends_at = now_s() + budget_s
    for n_round in range(ROUNDS_MAX):
        for rows, times in best.items():
            for way in ways_of(kind, rows.first, ways):
                if n_round >= ROUNDS_MIN and now_s() >= ends_at:
                    return best
                is_hopeless = times.get(way, 0) > HOPELESS * min(times.values(), default=0)
                if n_round >= ROUNDS_MIN and is_hopeless and not way.has_own_sums:
                    continue
                n_runs = SINGLE_RUNS if rows.last == 1 else 1
                times[way] = min(times.get(way, 2**62), *(run(rows.first, way) for _ in range(n_runs)))
    return best
