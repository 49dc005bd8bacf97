"""Where one model may be cut: the table of architectures, applied to a model's metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from swarmllm_proto.architectures import ARCHITECTURES


@dataclass(frozen=True)
class CutRule:
    """How one model may be cut."""

    cut_alignment: int
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: str = ""


def cut_rule(
    architecture: str,
    n_layers: int,
    number: Callable[[str], int | None],
    numbers: Callable[[str], Sequence[int] | None],
    checked_unit: int = 0,
) -> CutRule:
    """The rule for a model; `number` and `numbers` look up its metadata, whole numbers and lists of them,
    by the full key (None: absent, or something else). `checked_unit`: what a self-check found, which counts
    where the table knows nothing; 0: nothing."""
    row = ARCHITECTURES.get(architecture)
    if row is None and 0 < checked_unit < n_layers:
        return CutRule(checked_unit)
    if row is None:
        return CutRule(0, f"cutting the architecture {architecture} has not been verified")
    if row.whole_reason:
        return CutRule(0, row.whole_reason)
    if n_layers in row.whole_n_layers:
        return CutRule(0, f"libllama treats {architecture} with {n_layers} layers as a kind of its own")
    if row.stand_ins and n_layers not in dict(row.stand_ins):
        sizes = " and ".join(str(size) for size, _ in row.stand_ins)
        return CutRule(0, f"{architecture} can be cut with {sizes} layers only")
    for key in row.whole_if_zero:
        if number(f"{architecture}.{key}") == 0:
            return CutRule(0, f"its {key} is 0, and its last layer then differs by its number")
    alignment = row.cut_alignment
    if row.alignment_key:
        alignment = lcm(alignment, number(f"{architecture}.{row.alignment_key}") or 1)
    wanted: list[_Part] = []
    if row.recurrent_period or row.recurrent_where_zero:
        kinds = row.kinds(n_layers, number, numbers)
        if kinds is None:
            return CutRule(0, "its metadata does not say which of its layers are recurrent")
        wanted += [_Part(kind, "every part needs layers of both kinds") for kind in kinds]
    if row.needs_window:
        windowed = row.windowed(n_layers, number, numbers)
        wanted.append(_Part(windowed, "every part needs a layer with a sliding window"))
    if (heads := numbers(f"{architecture}.attention.head_count")) is not None:
        has_sizes = all(number(f"{architecture}.attention.{key}_length") for key in ("key", "value"))
        may_be_first = [n > 0 and (has_sizes or n == heads[0]) for n in heads[:n_layers]]
        reason = "libllama takes the size of heads from a part's first layer"
        wanted.append(_Part(may_be_first, reason, only_first=True))
    if wanted:
        found = _alignment(alignment, n_layers, wanted)
        if isinstance(found, str):
            return CutRule(0, f"{found}, and its layers cannot be divided evenly so")
        alignment = found
    if alignment >= n_layers:
        return CutRule(0, f"its layers may be cut at multiples of {alignment} only, and it has {n_layers}")
    return CutRule(alignment)


@dataclass(frozen=True)
class _Part:
    """Something that every part of a model must have."""

    layers: list[bool]
    """Which layers have it."""
    reason: str
    only_first: bool = False
    """The first layer of the part must have it; else any layer."""

    def fits(self, size: int) -> bool:
        starts = range(0, len(self.layers), size)
        return all(any(self.layers[at : at + (1 if self.only_first else size)]) for at in starts)


def _alignment(alignment: int, n_layers: int, wanted: Sequence[_Part]) -> int | str:
    """The smallest multiple of `alignment` at whose multiples the layers can be cut so that each part has
    what is wanted; the reason why not, where there is none."""
    if any(len(each.layers) != n_layers for each in wanted):
        return "its metadata lists another number of layers than it has"
    candidates = range(alignment, n_layers, alignment)
    for candidate in candidates:
        if all(each.fits(candidate) for each in wanted):
            return candidate
    unmet = [each.reason for each in wanted if not any(map(each.fits, candidates))]
    return unmet[0] if unmet else wanted[0].reason
