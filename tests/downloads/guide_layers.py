"""Layers of the guide, as a web server has it: what is fetched for them, and nodes that fetch them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import download_stand
import trio
from deadlines import DEADLINE_S
from download_stand import PIECE_BYTES, SETTINGS, Stand, guide

from swarmllm.models import CatalogueEntry, LayerRange, needed_tensors
from swarmllm.swarm.in_memory.network import InMemoryNetwork, node_id_named

NAME = "guide-q8_0"
THIRDS = {"a": "0:4", "b": "4:8", "c": "8:12"}
open_stand = partial(download_stand.open_stand, settings=replace(SETTINGS, piece_bytes=2**20))


def open_node(
    folder: Path, network: InMemoryNetwork, name: str, **options: Any
) -> AbstractAsyncContextManager[Stand]:
    """One of several; what it has outlasts it."""
    (folder / name).mkdir(exist_ok=True)
    return open_stand(folder / name, network=network, node_id=node_id_named(name), **options)


def wanted(layers: str) -> list[tuple[int, int]]:
    needed = needed_tensors(guide(), LayerRange.parse(layers))
    return [(tensor.offset, tensor.offset + tensor.size_bytes) for tensor in needed]


def header_bytes() -> int:
    """As it is read: in steps, because nobody knows its length before."""
    exact = min(tensor.offset for tensor in guide().tensors)
    at = 0
    while at < exact:
        at += max(PIECE_BYTES, at // 4)
    return at


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what other nodes say)
            await trio.sleep(0.01)


async def eventually(stand: Stand) -> CatalogueEntry:
    """The model that the layers became."""
    await until(lambda: not stand.gathering.views())
    return stand.catalogue.resolve(NAME)


def check_is_the_guide(entry: CatalogueEntry, stand: Stand, layers: str) -> None:
    assert entry.model_id == guide().model_id
    assert entry.is_stored
    assert entry.absent(needed_tensors(guide(), LayerRange.parse(layers))) == ()
    assert stand.store.verify(entry, lambda done, total: None) == ()
    assert stand.parts == []
