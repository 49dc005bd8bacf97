"""Lets libllama itself work out what keys, values and work space of layers will take.

libllama can read a header and lay out all buffers without making room for any (`no_alloc`), in some
hundredths of a second. Its figures are those that it gives when it really does it, for every architecture
and setting.
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

from swarmllm_proto.architectures import ARCHITECTURES, generic
from swarmllm_workers import operating_system
from swarmllm_workers.engine.libllama import Context, Model, capture_log
from swarmllm_workers.engine.segment import EngineSettings, context_settings
from swarmllm_workers.engine.segment_file import n_layers_of, plan_part
from swarmllm_workers.engine.shared_weights import header_file
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

log = logging.getLogger(__name__)

KNOWN_MAX: Final = 256
_CELLS: Final = re.compile(r"\bsize = +([\d.]+) MiB \(")
_WORK: Final = re.compile(r"\b(?:compute|output) buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class MemoryUse:
    kv_bytes: int
    """Of keys and values, and of recurrent states."""
    work_bytes: int


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
    sizes = (start, end, n_batch, settings.n_ctx, settings.n_slots, kept)
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
    with _header(source, start, end, n_layers) as path, capture_log() as lines:
        model = Model(path, use_mmap=False, no_alloc=True)
        try:
            made = context_settings(
                settings, is_recurrent=model.is_recurrent, has_head=end == n_layers, n_batch=n_batch
            )
            Context(model, made).close()
        finally:
            model.close()
    return MemoryUse(_bytes(_CELLS, lines), _bytes(_WORK, lines))


@contextmanager
def _header(source: GgufFile, start: int, end: int, n_layers: int) -> Iterator[Path]:
    """A file that looks like one with these layers, as far as libllama reads it."""
    if (start, end) == (0, n_layers):
        yield source.path
        return
    name = source.text("general.architecture")
    part = plan_part(source, ARCHITECTURES.get(name) or generic(name), start, end)
    with header_file(part) as path:
        yield path


def _bytes(what: re.Pattern[str], lines: list[str]) -> int:
    return sum(int(float(found[1]) * 2**20) for line in lines if (found := what.search(line)))
