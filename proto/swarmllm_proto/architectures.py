"""Lists what each model architecture needs to be cut at a layer boundary: a table, and its use for one model.

A segment is a small GGUF of some layers, renumbered from 0, that is fed hidden states (see `wire.md` and
the worker's `segment_file`). That is all most architectures need. The others differ in few ways, each a
column here: a layer's kind that depends on its absolute index, an input that is transformed before layer 0,
another name for the last layer's output, or state shared between layers, which no cut can keep.

The table is a hint: on a node that has the whole file, a self-check tries the cuts that the table allows, and
where parts are not exact, the file is cut more coarsely or not at all
(`swarmllm_workers.engine.cut_check`). An architecture that is not in the table is tried as `generic` says,
and is cut only where that check passed.

Rows are checked with llama-cpp-python 0.3.36 and 0.3.35, by `tests/workers/test_families.py` on models with
the metadata of published files, the others once on random models of 8 layers, with 0.3.36, from llama.cpp's
own test program (`tests/test-llama-archs.cpp`): for every cut the row allows, prefill and decode gave
libllama's own logits bit for bit. Left out, with the reason:

- the number of layers is in the arithmetic and in no metadata: minicpm3, and the members that
  `whole_n_layers` names;
- what a cut gives differs: afmoe, smallthinker, talkie; mpt is exact only with learned positions;
- state shared between layers: gemma3n, gemma4.

Models with recurrent layers are cut where every part has layers of both kinds. Their state cannot be rolled
back; what that costs is the worker's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from types import MappingProxyType
from typing import Final

import numpy as np

PER_LAYER_KEYS: Final = frozenset(
    {
        "attention.compress_ratios",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.indexer.types",
        "attention.recurrent_layers",
        "attention.sliding_window_pattern",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
        "xielu.alpha_n",
        "xielu.alpha_p",
        "xielu.beta",
        "xielu.eps",
    }
)
"""Metadata keys (without the architecture's prefix) whose arrays have one element per layer."""


def window_period(windowed: Sequence[bool]) -> int | None:
    """The period by which libllama takes exactly these layers for ones that attend to a window: all but the
    last of every so many. 0: all do. None: there is none."""
    period = windowed.index(False) + 1 if False in windowed else 0
    fits = all(is_windowed == ((at + 1) % period != 0) for at, is_windowed in enumerate(windowed) if period)
    return period if fits else None


@dataclass(frozen=True)
class WrittenOut:
    """Metadata that every segment states, because libllama would derive it from the number of layers."""

    key: str
    """Without the architecture's prefix."""
    value: int | float | Callable[[int], float]
    """Or a function of the model's number of layers."""
    n_layers: frozenset[int] = frozenset()
    """Only in models of so many layers; empty: in all."""
    n_vocab: int = 0
    """Only in models with so many tokens; 0: in all."""
    replaces: bool = False
    """Even where the model states it: libllama overlooks it there."""


@dataclass(frozen=True)
class Architecture:
    name: str
    cut_alignment: int = 1
    """Layers may be cut at multiples of this."""
    alignment_key: str = ""
    """Metadata key (without prefix) of another number whose multiples the boundaries must be, where it is
    present."""
    sliding_window_period: int = 0
    """Every so many layers one attends to everything and the others to a window, unless the metadata says
    which: segments get a period that says it of their layers, or where none does, the list written out. So
    any cut works. 0: not so, or always in the metadata."""
    sliding_window_dense_first: bool = False
    """The layer that attends to everything is the first of each period, not the last."""
    window_is_optional: bool = False
    """Without `attention.sliding_window` libllama builds the model with full attention everywhere. A
    segment none of whose layers has a window loses the key; in other architectures, where libllama
    insists on a window, its layers get one that is wider than any context."""
    needs_window: bool = False
    """Every part needs a layer with a sliding window: libllama aborts without one, and a layer without one
    computes something else, so it cannot be given a wide one."""
    recurrent_period: int = 0
    """The last of every so many layers (or `full_attention_interval` in the metadata) attends, the others
    are recurrent, unless the metadata says which: segments get the list written out."""
    recurrent_where_zero: tuple[str, ...] = ()
    """Layers are recurrent where the metadata's lists of these names hold 0, and attend where the first
    does not."""
    tap: str = "l_out"
    """Name in libllama's graph of a layer's output, which the graph completes with `-{layer}`."""
    input_tensor: str = ""
    """Name of the tensor that libllama derives from what it is fed (scaled, normalised, with positions
    added) and hands to layer 0. Segments that do not begin at layer 0 have it overwritten with the
    hidden state."""
    feeds_tokens: bool = False
    """libllama refuses to be fed rows, or wants several positions with each: segments are fed token 0 in
    their place, and `input_tensor` is overwritten in every segment."""
    deepstack_key: str = ""
    """Metadata key (without prefix) of the number of first layers behind which libllama adds a further part
    of a picture's row each. These parts come with the rows that enter layer 0, so all of these layers are in
    the first segment, and one more: of a segment's last layer libllama adds them to some rows only."""
    scales_tokens_only: bool = False
    """libllama multiplies embeddings of tokens by sqrt(n_embd), rows it is fed by nothing: the worker
    multiplies."""
    reset_keys: tuple[tuple[str, int | float], ...] = ()
    """Metadata (without prefix) set to these values in segments that do not begin at layer 0."""
    written_out: tuple[WrittenOut, ...] = ()
    """The first that fits of each key counts."""
    stand_ins: tuple[tuple[int, str], ...] = ()
    """(number of layers, architecture): libllama computes models of so many layers as that other
    architecture would, and segments say they are of it. Models of other sizes run whole."""
    whole_reason: str = ""
    """Why it cannot be cut at all; "" where it can."""
    whole_if_zero: tuple[str, ...] = ()
    """It runs whole where one of these numbers in the metadata (without prefix) is 0."""
    whole_n_layers: frozenset[int] = frozenset()
    """libllama tells this family's members apart by their number of layers and computes these differently:
    they run whole, and no segment has so many layers."""
    scaled_by_width_n_layers: frozenset[int] = frozenset()
    """In models of so many layers libllama scales queries by 1/sqrt(n_embd / n_heads), in all others by
    1/sqrt(head size): segments have the factor put right in the graph."""
    avoided_n_layers: frozenset[int] = frozenset()
    """No segment has so many layers: libllama would take it for another member of the family."""
    is_generic: bool = False
    """Not a row of the table. Segments are units of as many layers as the cut alignment says, because those
    were checked and no others; every list with an element per block is taken for one per layer."""

    def attends_in_window(self, layer: int, period: int) -> bool:
        """Whether a layer (absolute index) attends to a window, by a period. 0: every layer does."""
        at = layer % period if period else 1
        return period == 0 or (at != 0 if self.sliding_window_dense_first else at < period - 1)

    def pieces(
        self, start: int, end: int, cut_alignment: int, periodic: Sequence[bool] = ()
    ) -> tuple[tuple[int, int], ...]:
        """Layers [start, end) as one segment, or as several where one may not have so many layers.
        `periodic`: which layers of the model attend to a window, where a segment cannot list them: each then
        has layers of which a period says it."""
        if self.is_generic:
            return tuple((at, min(at + cut_alignment, end)) for at in range(start, end, cut_alignment))
        size = end - start
        if periodic and window_period(periodic[start:end]) is None:
            middle = periodic.index(False, start) + 1  # a whole period may begin here
        elif size in self.avoided_n_layers | self.whole_n_layers:
            middle = start + max(size // 2 // cut_alignment, 1) * cut_alignment
        else:
            return ((start, end),)
        return (
            *self.pieces(start, middle, cut_alignment, periodic),
            *self.pieces(middle, end, cut_alignment, periodic),
        )

    def windowed(
        self,
        n_layers: int,
        number: Callable[[str], int | None],
        numbers: Callable[[str], Sequence[int] | None],
    ) -> list[bool]:
        """Which layers attend to a window, by the metadata or else by the table."""
        key = f"{self.name}.attention.sliding_window_pattern"
        if (listed := numbers(key)) is not None:
            return [bool(item) for item in listed[:n_layers]]
        period = number(key)
        period = self.sliding_window_period if period is None else period
        return [self.attends_in_window(layer, period) for layer in range(n_layers)]

    def kinds(
        self,
        n_layers: int,
        number: Callable[[str], int | None],
        numbers: Callable[[str], Sequence[int] | None],
    ) -> tuple[list[bool], list[bool]] | None:
        """Which layers attend and which are recurrent, in a model that has both kinds of layer. None: the
        metadata does not say."""
        if self.recurrent_period:
            listed = numbers(f"{self.name}.attention.recurrent_layers")
            period = number(f"{self.name}.full_attention_interval") or self.recurrent_period
            if listed is None:
                listed = [(layer + 1) % period != 0 for layer in range(n_layers)]
            recurrent = [bool(item) for item in listed[:n_layers]]
            attending = [not item for item in recurrent]
        else:
            lists = [numbers(f"{self.name}.{key}") for key in self.recurrent_where_zero]
            if lists[0] is None:
                return None
            attending = [bool(item) for item in lists[0][:n_layers]]
            columns = zip(*(item[:n_layers] for item in lists if item is not None), strict=True)
            recurrent = [not any(column) for column in columns]
        return (attending, recurrent) if len(recurrent) == n_layers else None

    def stand_in(self, n_layers: int) -> str:
        """The architecture that a segment says it is of."""
        return dict(self.stand_ins).get(n_layers, self.name)


_PLAIN: Final = (
    "arcee arctic bailingmoe bailingmoe2 chatglm codeshell command-r dbrx deci deepseek dots1 ernie4_5 "
    "exaone falcon falcon-h1 gptneox grovemoe hunyuan-dense hunyuan-moe internlm2 jais llama maincoder "
    "mamba mamba2 minimax-m2 mistral3 nemotron olmo olmoe openelm orion pangu-embedded phi2 phi3 phimoe "
    "plamo qwen qwen2 qwen2moe qwen3 qwen3moe refact seed_oss stablelm starcoder2 xverse"
)
"""Architectures that need nothing."""


def _minicpm_residual_scale(n_layers: int) -> float:
    """In single precision, step by step, as libllama computes it."""
    return float(np.float32(1.4) / np.sqrt(np.float32(n_layers)))


UNITS_MAX: Final = 8

_ZERO_KV_HEADS: Final = ("attention.head_count_kv",)
_UNSCALED: Final = (("embedding_scale", 1.0),)

_TABLE: Final = (
    *(Architecture(name) for name in _PLAIN.split()),
    # 7B is llama under another name; 13B has ALiBi instead of rotation, which refact does likewise.
    Architecture("baichuan", stand_ins=((32, "llama"), (40, "refact"))),
    Architecture("bloom", input_tensor="inp_norm-0"),
    # Its windowed layers rotate positions and the others do not: both kinds must stay what they are.
    Architecture("cohere2", sliding_window_period=4, needs_window=True),
    Architecture(
        "deepseek2",
        written_out=(
            # V2 Lite and its kin: queries are not compressed, whatever the file says.
            WrittenOut("attention.q_lora_rank", 0, n_layers=frozenset({26, 27}), replaces=True),
            WrittenOut("attention.q_lora_rank", 0, n_layers=frozenset({48}), n_vocab=128256, replaces=True),
            WrittenOut("expert_gating_func", 2, n_layers=frozenset({47, 48}), n_vocab=154880),
            WrittenOut("expert_gating_func", 1),
        ),
        avoided_n_layers=frozenset({26, 27, 48}),
    ),
    Architecture("ernie4_5-moe", alignment_key="interleave_moe_layer_step"),
    Architecture("exaone4", whole_n_layers=frozenset({64})),
    Architecture("gemma", input_tensor="inp_scaled"),
    Architecture(
        "gemma2",
        sliding_window_period=2,
        input_tensor="inp_scaled",
        scaled_by_width_n_layers=frozenset({46}),
        avoided_n_layers=frozenset({46}),
    ),
    Architecture(
        "gemma3",
        sliding_window_period=6,
        window_is_optional=True,
        scales_tokens_only=True,
        scaled_by_width_n_layers=frozenset({62}),
        avoided_n_layers=frozenset({62}),
    ),
    Architecture("glm4", input_tensor="embd", feeds_tokens=True),
    Architecture("glm4moe", input_tensor="embd", feeds_tokens=True),
    Architecture("gpt-oss", sliding_window_period=2),
    Architecture("gpt2", input_tensor="inpL"),
    Architecture("granite", reset_keys=_UNSCALED),
    Architecture("granitemoe", reset_keys=_UNSCALED),
    Architecture("granitehybrid", recurrent_where_zero=_ZERO_KV_HEADS, reset_keys=_UNSCALED),
    Architecture("grok", reset_keys=_UNSCALED),
    Architecture("jamba", recurrent_where_zero=_ZERO_KV_HEADS),
    Architecture("kimi-linear", recurrent_where_zero=_ZERO_KV_HEADS),
    Architecture("lfm2", recurrent_where_zero=_ZERO_KV_HEADS),
    Architecture("lfm2moe", recurrent_where_zero=_ZERO_KV_HEADS),
    # Every fourth layer does not rotate positions; a window of 0 means that all but the very last do.
    Architecture(
        "llama4",
        cut_alignment=4,
        alignment_key="interleave_moe_layer_step",
        whole_if_zero=("attention.sliding_window",),
    ),
    Architecture("mellum", sliding_window_period=4),
    Architecture(
        "minicpm",
        reset_keys=_UNSCALED,
        written_out=(WrittenOut("residual_scale", _minicpm_residual_scale),),
    ),
    # Some of its layers neither attend nor recur: they have a feed-forward part alone.
    *(
        Architecture(
            name,
            recurrent_where_zero=(*_ZERO_KV_HEADS, "feed_forward_length"),
            tap="nemotron_h_block_out",
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    ),
    Architecture("olmo2", sliding_window_period=4, window_is_optional=True),
    Architecture("plamo3", sliding_window_period=8, window_is_optional=True),
    Architecture("qwen2vl", input_tensor="embd", feeds_tokens=True),
    *(
        Architecture(
            name,
            input_tensor="embd",
            feeds_tokens=True,
            deepstack_key="n_deepstack_layers",
            reset_keys=(("n_deepstack_layers", 0),),
        )
        for name in ("qwen3vl", "qwen3vlmoe")
    ),
    Architecture("qwen35", recurrent_period=4, input_tensor="model.input_embed", feeds_tokens=True),
    Architecture("qwen35moe", recurrent_period=4, input_tensor="model.input_embed", feeds_tokens=True),
    Architecture("qwen3next", recurrent_period=4),
    Architecture("smollm3", cut_alignment=4),
    Architecture("starcoder", input_tensor="inpL"),
)

TEXT_ENCODERS: Final = frozenset(
    {
        *("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert"),
        *("modern-bert", "eurobert", "gemma-embedding"),
    }
)
"""Read a text as a whole, in both directions, and give a vector or scores for it. They go on with no text."""

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType({row.name: row for row in _TABLE})


def generic(architecture: str) -> Architecture:
    """How to try an architecture that the table does not have: as most of its rows are."""
    return Architecture(architecture, reset_keys=_UNSCALED, is_generic=True)


def n_deepstack_layers(architecture: str, number: Callable[[str], int | None]) -> int:
    """Further parts, each as wide as a hidden state, that a picture's row has at layer 0. `number`: as of
    `cut_rule`."""
    row = ARCHITECTURES.get(architecture)
    if row is None or not row.deepstack_key:
        return 0
    return number(f"{architecture}.{row.deepstack_key}") or 0


def units_to_try(n_layers: int, alignment: int = 0) -> tuple[int, ...]:
    """Numbers of layers to cut a model into, the finest first. `alignment`: multiples of what the table
    allows; 0: it does not know the architecture. Of such a model every segment has memory of its own to
    compute in, so there are eight at most. Patterns of layers that repeat do so every 2, 3, 4 or 6."""
    if alignment:
        units = {alignment * period * 2**n for period in (1, 3) for n in range(n_layers.bit_length())}
    else:
        finest = -(-n_layers // UNITS_MAX)
        units = {-(-finest // period) * period for period in (1, 4, 6)}
    return tuple(sorted(unit for unit in units if unit < n_layers))


FAILED: Final = "a self-check of this file found no cut at which its layers give the same numbers"


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
    *,
    lists_windows: bool = True,
) -> CutRule:
    """The rule for a model; `number` and `numbers` look up its metadata, whole numbers and lists of them,
    by the full key (None: absent, or something else). `checked_unit`: what a self-check found: layers may be
    cut at multiples of it, or, where it is no less than the number of layers, nowhere; 0: nothing. It counts
    where the table knows nothing, or allows at least as much. `lists_windows`: False: a release of libllama
    to which no list of its windows can be given."""
    if architecture in TEXT_ENCODERS:
        return CutRule(0, "it reads texts as a whole, and is not cut over nodes")
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
    alignment = lcm(alignment, 1 + n_deepstack_layers(architecture, number))
    wanted: list[_Part] = []
    if row.recurrent_period or row.recurrent_where_zero:
        kinds = row.kinds(n_layers, number, numbers)
        if kinds is None:
            return CutRule(0, "its metadata does not say which of its layers are recurrent")
        wanted += [_Part(kind, "every part needs layers of both kinds") for kind in kinds]
    if row.needs_window:
        windowed = row.windowed(n_layers, number, numbers)
        wanted.append(_Part(windowed, "every part needs a layer with a sliding window"))
        if not lists_windows:
            follows_window = [at == 0 or windowed[at - 1] or windowed[at] for at in range(len(windowed))]
            if not all(follows_window):
                return CutRule(0, "this release of libllama takes no list of its windows")
            reason = "this release of libllama counts windows from a part's first layer"
            wanted.append(_Part(windowed, reason, only_first=True))
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
    if checked_unit >= n_layers:
        return CutRule(0, FAILED)
    if checked_unit and checked_unit % alignment == 0:
        alignment = checked_unit
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
