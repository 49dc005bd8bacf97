"""Predicts how much memory layers will take, and measures how much there is.

Weights are the tensors' bytes. Keys, values and work space are what libllama works out for such layers
(`memory_dry_run.py`). Where it does not say, on a GPU, they are estimated: keys and values follow from the
heads and the context; work space is mostly the attention scores of one layer, for the largest graph of 512
rows, and the factors here are those of libllama's own figures for models of 12 to 24 layers, rounded up.

Pages of a file that several segments have count once. Mapped weights count in full: they are read for every
token, and a model that does not fit crawls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from swarmllm_proto.ipc import KvType
from swarmllm_workers.engine import gpus
from swarmllm_workers.engine.engine_settings import EngineSettings, exact_settings, rows_of_exact_batch
from swarmllm_workers.engine.kv_layout import is_fused
from swarmllm_workers.engine.libllama import N_BATCH
from swarmllm_workers.engine.memory_dry_run import dry_run, other_bytes
from swarmllm_workers.engine.ranges import Range, join, merge
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import ARRAY, STRING, GgufFile

_F32: Final = 4
_F16: Final = 2
_VALUE_BYTES: Final = {"f16": 2.0, "q8_0": 34 / 32}
_NO_LIMIT: Final = 2**60
"""What a control group without a limit says, or more."""
AVAILABLE: Final = "are available"
WITH_GPU: Final = "are available on this machine and its GPUs together"
ALLOWED: Final = "are allowed (resources.max_model_gib)"


@dataclass(frozen=True)
class Memory:
    weights_bytes: int = 0
    kv_bytes: int = 0
    work_bytes: int = 0
    mapped_bytes: int = 0
    """Weights that are mapped from files: Linux counts them as available to every process."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.work_bytes

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.weights_bytes + other.weights_bytes,
            self.kv_bytes + other.kv_bytes,
            self.work_bytes + other.work_bytes,
            self.mapped_bytes + other.mapped_bytes,
        )


def predict(source: GgufFile, n_layers: int, pieces: Iterable[Range], settings: EngineSettings) -> Memory:
    """Of segments of these ranges, each with a KV cache and work space of its own, as libllama says. Of each
    kind of piece it takes a while the first time."""
    total = Memory()
    for start, end in pieces:
        taken = dry_run(source, start, end, settings, N_BATCH)
        if taken is None:
            total += estimate(source, n_layers, [(start, end)], settings)
        else:
            weights_bytes = _weights_bytes(source, start, end, has_head=end == n_layers)
            compute_bytes = taken.compute_bytes
            if compute_bytes is None:
                compute_bytes = _compute_bytes(source, settings, N_BATCH)
            work_bytes = taken.buffer_bytes + compute_bytes + taken.context_bytes
            total += Memory(weights_bytes, taken.kv_bytes, work_bytes)
    return total


def estimate(
    source: GgufFile,
    n_layers: int,
    pieces: Iterable[Range],
    settings: EngineSettings,
    *,
    n_batch: int = N_BATCH,
) -> Memory:
    """The same from the header alone and at once, with more work space than is needed. `n_batch`: rows of
    one batch at most."""
    total = Memory()
    for start, end in pieces:
        has_head = end == n_layers
        kv_bytes = sum(_kv_bytes(source, layer, settings) for layer in range(start, end))
        weights_bytes = _weights_bytes(source, start, end, has_head=has_head)
        work_bytes = _work_bytes(source, settings, n_batch, has_head=has_head)
        n_embd = _number(source, "embedding_length")
        work_bytes += other_bytes(source, (start, end), n_batch, n_embd, n_embd)
        total += Memory(weights_bytes, kv_bytes, work_bytes)
    return total


def _weights_bytes(source: GgufFile, start: int, end: int, *, has_head: bool) -> int:
    size = 0
    is_tied = "output.weight" not in source.tensors
    for tensor in source.tensors.values():
        if tensor.name.startswith("blk."):
            needed = start <= int(tensor.name.split(".")[1]) < end
        elif tensor.name == "token_embd.weight":
            needed = has_head and (is_tied or start == 0)
        else:
            needed = has_head or tensor.name != "output.weight"
        size += tensor.size_bytes if needed else 0
    return size


def _kv_bytes(source: GgufFile, layer: int, settings: EngineSettings) -> int:
    n_embd = _number(source, "embedding_length")
    n_heads = _number(source, "attention.head_count", layer)
    n_kv_heads = _number(source, "attention.head_count_kv", layer, n_heads)
    head_size = n_embd // n_heads if n_heads else 0
    row = _number(source, "attention.key_length", layer, head_size)
    row += _number(source, "attention.value_length", layer, head_size)
    cells = int(settings.n_ctx * n_kv_heads * row * _VALUE_BYTES[settings.kv_type])
    return cells + _states_bytes(source, layer, settings)


def _states_bytes(source: GgufFile, layer: int, settings: EngineSettings) -> int:
    inner = _number(source, "ssm.inner_size", layer)
    state = _number(source, "ssm.state_size", layer) + _number(source, "ssm.conv_kernel", layer)
    return settings.n_slots * inner * state * _F32


def _work_bytes(source: GgufFile, settings: EngineSettings, n_batch: int, *, has_head: bool) -> int:
    n_layers = _number(source, "block_count")
    n_heads = max((_number(source, "attention.head_count", layer) for layer in range(n_layers)), default=0)
    n_masks = 2 if _number(source, "attention.sliding_window") else 1
    n_scores = n_masks if is_fused(source, settings) else n_heads + 2 * n_masks
    width = 2 * _widest(source) + 4 * _number(source, "embedding_length")
    n_outputs = settings.n_slots + settings.prefixes.n_cells_entries if has_head else 0
    buffer_bytes = int(n_batch * _F32 * (n_scores * settings.n_ctx + width))
    # A layer computes on a copy of its states.
    buffer_bytes += max((_states_bytes(source, layer, settings) for layer in range(n_layers)), default=0)
    return buffer_bytes + n_outputs * _n_vocab(source) * _F32 + _compute_bytes(source, settings, n_batch)


def _compute_bytes(source: GgufFile, settings: EngineSettings, n_batch: int) -> int:
    """What ggml takes besides: the second factor of the largest product, in f16 at most."""
    n_layers = _number(source, "block_count")
    n_heads = max((_number(source, "attention.head_count", layer) for layer in range(n_layers)), default=0)
    n_scores = 0 if is_fused(source, settings) else n_heads * settings.n_ctx
    return n_batch * _F16 * max(n_scores, _widest(source), _number(source, "embedding_length"))


def _widest(source: GgufFile) -> int:
    """Of the rows between the two products of a feed-forward network; of all experts that a row takes."""
    n_layers = _number(source, "block_count")
    n_ff = max((_number(source, "feed_forward_length", layer) for layer in range(n_layers)), default=0)
    return max(n_ff, _number(source, "expert_feed_forward_length") * _number(source, "expert_used_count"))


def _n_vocab(source: GgufFile) -> int:
    return source.tensors["token_embd.weight"].shape[-1] if "token_embd.weight" in source.tensors else 0


def _number(source: GgufFile, key: str, layer: int = 0, default: int = 0) -> int:
    """Of the architecture's metadata, a layer's own where there is one for each."""
    value = source.values.get(f"{source.text('general.architecture')}.{key}")
    if value is None or value.type == STRING:
        return default
    if value.type != ARRAY:
        return max(int(value.scalar()), 0)
    numbers = value.numbers()
    return max(int(numbers[layer]), 0) if layer < len(numbers) else default


def refuse_what_does_not_fit(needed: Memory, what: str, limit_bytes: int, whose: str = AVAILABLE) -> None:
    """Raises CallError out_of_memory if the layers do not fit."""
    if needed.total_bytes > limit_bytes:
        raise CallError(
            "out_of_memory",
            f"{what} would take {_gib(needed.total_bytes)} (weights {_gib(needed.weights_bytes)}, keys and "
            f"values {_gib(needed.kv_bytes)}, work space {_gib(needed.work_bytes)}), and {_gib(limit_bytes)} "
            f"{whose}: load fewer layers, or lower n_ctx",
        )


def refuse_beside(
    needed: Memory,
    what: str,
    held: Memory,
    leaving: Memory,
    settings: EngineSettings,
    mapped_beside_bytes: int = 0,
) -> None:
    """Raises CallError out_of_memory where the machine has no room for `needed`, or it is not allowed beside
    what is `held`; `leaving`, which is part of that, is given back before. `mapped_beside_bytes`: weights
    that other processes of this node have mapped."""
    # Mapped weights are page cache, which counts as available. But they are read for every token: what takes
    # their room makes each token wait for the disk. What is mapped and leaves is available already.
    given_back = leaving.total_bytes - leaving.mapped_bytes
    in_use_bytes = held.mapped_bytes - leaving.mapped_bytes + mapped_beside_bytes
    on_gpus = gpus.free_bytes(gpus.gpus()) if settings.n_gpu_layers else 0
    limit_bytes = max(0, available_bytes() - in_use_bytes) + on_gpus + given_back
    refuse_what_does_not_fit(needed, what, limit_bytes, WITH_GPU if on_gpus else AVAILABLE)
    if settings.max_bytes:
        limit_bytes = settings.max_bytes + leaving.total_bytes
        refuse_what_does_not_fit(needed + held, what, limit_bytes, ALLOWED)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def available_bytes(root: Path = Path("/")) -> int:
    """What the machine can still give, or this process's control group (versions 1 and 2), page cache that
    can go included; a huge number where nobody says. `root`: of the file system."""
    found = [_NO_LIMIT]
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append(int(rest.split()[0]) * 1024)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            base = root / "sys/fs/cgroup"
            caches = "inactive_file", "active_file"
            found += _room_in(base, group, "memory.max", "memory.current", caches)
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            caches = "total_inactive_file", "total_active_file"
            found += _room_in(base, group, "memory.limit_in_bytes", "memory.usage_in_bytes", caches)
    return max(min(found), 0)


def _room_in(base: Path, group: str, limit: str, usage: str, caches: tuple[str, ...]) -> list[int]:
    """Of the group and of those it is in. In a container the group's path is that outside, and the files lie
    at the base."""
    folder = base / group.lstrip("/")
    rooms = []
    for each in (folder, *(parent for parent in folder.parents if base in (parent, *parent.parents))):
        limits, usages = _lines(each / limit), _lines(each / usage)
        if limits and usages and limits[0].isdigit() and int(limits[0]) < _NO_LIMIT:
            stat = [line.split() for line in _lines(each / "memory.stat")]
            cached_bytes = sum(int(words[1]) for words in stat if words[0] in caches)
            rooms.append(int(limits[0]) - int(usages[0]) + cached_bytes)
    return rooms


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def n_gpu_layers_of(source: GgufFile, n_layers: int, piece: Range, settings: EngineSettings) -> int:
    """How many layers of a segment of this range libllama is to put on the GPUs: as the settings say, or as
    many as fit at this moment."""
    if isinstance(settings.n_gpu_layers, int):
        return settings.n_gpu_layers
    start, end = piece
    layers = [
        _weights_bytes(source, layer, layer + 1, has_head=False) + _kv_bytes(source, layer, settings)
        for layer in range(start, end)
    ]
    others_bytes = _weights_bytes(source, 0, 0, has_head=False)
    head_bytes = _weights_bytes(source, end, end, has_head=True) if end == n_layers else 0
    work_bytes = _work_bytes(source, settings, N_BATCH, has_head=end == n_layers)
    return gpus.n_layers_that_fit(
        [size - others_bytes for size in layers],
        max(0, head_bytes - others_bytes),
        work_bytes + others_bytes,
        gpus.free_bytes(gpus.gpus()),
    )


class Footprint:
    """Tells how much memory the segments of a model take, and whether more fit beside them."""

    def __init__(self, source: GgufFile, name: str, n_layers: int, settings: EngineSettings) -> None:
        self._source = source
        self._name = name
        self._n_layers = n_layers
        self._settings = settings
        self.mapped_beside_bytes = 0
        """Weights that other workers of this node have mapped, or are mapping, as the daemon said last."""

    def predicted(self, pieces: Iterable[Range]) -> Memory:
        """Of segments of these ranges that share nothing. Of each kind of range it takes a while the first
        time."""
        return predict(self._source, self._n_layers, pieces, self._settings)

    def weights_bytes(self, pieces: Iterable[Range]) -> int:
        return estimate(self._source, self._n_layers, pieces, self._settings).weights_bytes

    def row_bytes(self, start: int, end: int) -> int:
        """The estimated KV bytes of one row in layers [start, end)."""
        kv_bytes = estimate(self._source, self._n_layers, [(start, end)], self._settings).kv_bytes
        return kv_bytes // self._settings.n_ctx

    def of(self, segments: Sequence[Segment]) -> Memory:
        """As predicted, but for what is mapped."""
        alone = self.predicted(_ranges(segments))
        own = weighing(segments)
        return replace(
            alone,
            weights_bytes=self.weights_bytes(_ranges(own)),
            mapped_bytes=sum(segment.mapped_bytes for segment in own),
        )

    def apart(
        self,
        pieces: Sequence[Range],
        n_rows: int,
        *,
        gives_rows: bool = False,
        kv_type: KvType | None = None,
    ) -> Memory:
        """Of segments of these ranges for one exact request of so many rows, over weights that are there; an
        estimate, because it begins between two steps. `gives_rows`: the head computes all rows of a batch."""
        settings = exact_settings(self._settings, n_rows, kv_type)
        n_batch = rows_of_exact_batch(settings)
        memory = estimate(self._source, self._n_layers, pieces, settings, n_batch=n_batch)
        if gives_rows and any(end == self._n_layers for _, end in pieces):
            # Where they are computed, and where they are read.
            logits_bytes = 2 * n_batch * _n_vocab(self._source) * _F32
            memory = replace(memory, work_bytes=memory.work_bytes + logits_bytes)
        return replace(memory, weights_bytes=0)

    def refuse_apart(
        self,
        pieces: Sequence[Range],
        n_rows: int,
        held: Memory,
        *,
        gives_rows: bool = False,
        kv_type: KvType | None = None,
    ) -> None:
        """Raises CallError out_of_memory if there is no room for those segments."""
        what = f"cells for an exact request of {n_rows} rows of {self._name}"
        apart = self.apart(pieces, n_rows, gives_rows=gives_rows, kv_type=kv_type)
        refuse_beside(apart, what, held, Memory(), self._settings, self.mapped_beside_bytes)

    def refuse(
        self,
        pieces: Sequence[Range],
        held: Sequence[Segment],
        leaving: Sequence[Segment] = (),
        sharing: Sequence[Segment] = (),
    ) -> None:
        """Raises CallError out_of_memory where pieces do not fit beside the segments that are `held`.
        `leaving`: those of them that are closed before. `sharing`: those that stay, and of which pieces have
        the pages."""
        new = [piece for piece in pieces if not any(_holds(segment, piece) for segment in sharing)]
        needed = replace(self.predicted(pieces), weights_bytes=self.weights_bytes(new))
        what = f"layers {join(merge(pieces))} of {self._name}"
        refuse_beside(needed, what, self.of(held), self.of(leaving), self._settings, self.mapped_beside_bytes)


def weighing(segments: Sequence[Segment]) -> list[Segment]:
    """Those whose weights are not pages of another one's, too."""
    found: list[Segment] = []
    for each in sorted(segments, key=lambda segment: segment.start - segment.end):
        others = [other for other in found if other.is_shared and other.path == each.path]
        if not each.is_shared or not any(_holds(other, (each.start, each.end)) for other in others):
            found.append(each)
    return found


def around(piece: Range, segments: Sequence[Segment]) -> Segment:
    """The one that has these layers."""
    return next(segment for segment in segments if _holds(segment, piece))


def _holds(segment: Segment, piece: Range) -> bool:
    return segment.start <= piece[0] and piece[1] <= segment.end


def _ranges(segments: Iterable[Segment]) -> list[Range]:
    return [(segment.start, segment.end) for segment in segments]
