"""Lets libllama itself work out what keys, values and work space of layers will take.

libllama can read a header and lay out all buffers without making room for any (`no_alloc`), in some
hundredths of a second. Its figures are those that it gives when it really does it, for every architecture
and setting. What ggml takes to compute the graph, of which libllama does not speak, comes from
`kernels/memory_calls.py`. Rows that are fed to a part of a model are kept several times beside that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from swarmllm_proto.architectures import ARCHITECTURES, Architecture, generic
from swarmllm_workers import operating_system
from swarmllm_workers.engine.engine_settings import EngineSettings, context_settings
from swarmllm_workers.engine.libllama import N_BATCH, Context, Model, capture_log
from swarmllm_workers.engine.segment_file import n_layers_of, plan_part
from swarmllm_workers.engine.shared_weights import header_file
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.kernels import memory_calls

log = logging.getLogger(__name__)

KNOWN_MAX: Final = 256
_CELLS: Final = re.compile(r"\bsize = +([\d.]+) MiB \(")
_WORK: Final = re.compile(r"\b(?:compute|output) buffer size = +([\d.]+) MiB")


_F32: Final = 4
_NODES: Final = re.compile(r"\bmax_nodes = (\d+)")
_NODE_BYTES: Final = 896
"""Of what libllama and ggml keep of each operation that a context's graphs may have, as measured with 1,024
and 20,480 of them."""
_NODES_MIN: Final = 1024
_FED_COPIES: Final = 3
"""Of the rows that a part is fed libllama keeps those of this graph, of the one before, and of the largest,
for which it has reserved room."""


@dataclass(frozen=True)
class MemoryUse:
    kv_bytes: int
    """Of keys and values, and of recurrent states."""
    buffer_bytes: int
    """Of libllama's buffers for a graph and what comes of it."""
    compute_bytes: int | None
    """What ggml takes besides to compute the graph; None: nobody knows."""
    context_bytes: int
    """Of the rows that enter and leave a part of a model, and of what describes a graph."""


_known: WeakKeyDictionary[GgufFile, dict[tuple[object, ...], MemoryUse | None]] = WeakKeyDictionary()


def dry_run(
    source: GgufFile, start: int, end: int, settings: EngineSettings, n_batch: int
) -> MemoryUse | None:
    """Of a segment of layers [start, end), for batches of so many rows. None where libllama does not say: on
    a GPU, elsewhere than on Linux, and where it cannot run them at all."""
    if settings.n_gpu_layers or not operating_system.IS_LINUX:
        return None
    known = _known.setdefault(source, {})
    kept = settings.prefixes.n_cells_entries
    sizes = (start, end, n_batch, settings.n_ctx, settings.n_slots, settings.n_threads, kept)
    key = (*sizes, settings.kv_type, settings.flash_attention)
    if key not in known:
        if len(known) >= KNOWN_MAX:
            known.clear()
        try:
            known[key] = _dry_run(source, start, end, settings, n_batch)
        except CallError as error:
            log.info("what layers %d:%d will take is estimated: %s", start, end, error.message)
            known[key] = None
    return known[key]


def _dry_run(source: GgufFile, start: int, end: int, settings: EngineSettings, n_batch: int) -> MemoryUse:
    n_layers = n_layers_of(source)
    with (
        _header(source, start, end, n_layers) as path,
        capture_log() as lines,
        memory_calls.watching(settings.n_threads) as compute_bytes,
    ):
        model = Model(path, use_mmap=False, no_alloc=True)
        try:
            made = context_settings(
                settings, is_recurrent=model.is_recurrent, has_head=end == n_layers, n_batch=n_batch
            )
            Context(model, made).close()
            n_nodes = max((int(found[1]) for line in lines if (found := _NODES.search(line))), default=0)
            context_bytes = other_bytes(
                source, (start, end), n_batch, model.n_embd_input, model.n_embd, max(_NODES_MIN, n_nodes)
            )
        finally:
            model.close()
        return MemoryUse(_bytes(_CELLS, lines), _bytes(_WORK, lines), compute_bytes(), context_bytes)


def other_bytes(
    source: GgufFile,
    layers: tuple[int, int],
    n_batch: int,
    n_embd_input: int,
    n_embd: int,
    n_nodes: int = _NODES_MIN,
) -> int:
    """What a segment takes beside its buffers: graphs of so many operations, rows that enter a part of a
    model (the whole model has token ids) and rows that leave it for the next one. Ours have room for N_BATCH,
    libllama's for `n_batch`; parts of some architectures are fed token ids, which rows replace."""
    graph_bytes, n_layers = n_nodes * _NODE_BYTES, n_layers_of(source)
    if layers == (0, n_layers):
        return graph_bytes
    n_fed = N_BATCH + (0 if _architecture(source).feeds_tokens else _FED_COPIES * n_batch)
    given_bytes = N_BATCH * n_embd * _F32 if layers[1] < n_layers else 0
    return graph_bytes + n_fed * n_embd_input * _F32 + given_bytes


def _architecture(source: GgufFile) -> Architecture:
    name = source.text("general.architecture")
    return ARCHITECTURES.get(name) or generic(name)


@contextmanager
def _header(source: GgufFile, start: int, end: int, n_layers: int) -> Iterator[Path]:
    """A file that looks like one with these layers, as far as libllama reads it."""
    if (start, end) == (0, n_layers):
        yield source.path
        return
    with header_file(plan_part(source, _architecture(source), start, end)) as path:
        yield path


def _bytes(what: re.Pattern[str], lines: list[str]) -> int:
    return sum(int(float(found[1]) * 2**20) for line in lines if (found := what.search(line)))
