"""Opens the data folder: the folder itself, the catalogue in it, the store of models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import trio

from swarmllm.errors import ConfigError, StoreLocked
from swarmllm.guide import GUIDE_PATH, GUIDE_TEMPERATURE, GUIDE_TYPICAL_P, PROJECTOR_PATH
from swarmllm.models import Catalogue, CatalogueEntry, Store
from swarmllm.models.presets import Preset, Presets, SamplingDefaults
from swarmllm.models.projector import read_projector
from swarmllm.models.segment_copies import SEGMENTS

log = logging.getLogger(__name__)

DOWNLOADS = "downloads"
"""In the data folder: what is on its way from the web."""
PROJECTORS = "projectors"
"""In the data folder: projectors that were fetched."""
KERNEL_TIMINGS = "kernel-timings.json"
GUIDE_NAME = "guide"
T = TypeVar("T")


async def when_free(open_it: Callable[..., T], *args: object) -> T:
    """What `open_it(*args)` gives, in a thread; waits while another process holds the database."""
    while True:
        try:
            return await trio.to_thread.run_sync(open_it, *args)
        except StoreLocked as error:
            log.warning("the start waits: %s", error.message)


def prepare_data_dir(data_dir: Path) -> Path:
    """Make it, for this user only. Raises ConfigError."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Cannot use the data folder {data_dir}: {error.strerror}", field="node.data_dir"
        ) from None
    return data_dir


def open_catalogue(data_dir: Path) -> Catalogue:
    """The models of this node; the bundled guide is always among them, with its projector. When it is new
    here it gets a preset, which is the user's from then on."""
    catalogue = Catalogue(data_dir / "catalogue.sqlite")
    is_new = all(entry.name != GUIDE_NAME for entry in catalogue.list())
    _attach_projector(catalogue, catalogue.ensure(GUIDE_PATH, GUIDE_NAME))
    if is_new:
        sampling = SamplingDefaults(temperature=GUIDE_TEMPERATURE, typical_p=GUIDE_TYPICAL_P)
        Presets(catalogue).put(GUIDE_NAME, Preset(sampling=sampling))
    return catalogue


def _attach_projector(catalogue: Catalogue, guide: CatalogueEntry) -> None:
    """Unless the user has given the guide another projector. What was loaded or unloaded stays so, but for a
    file of another version. Nothing is tried: the file has tests of its own."""
    known = guide.attached_projector
    if known is not None and known.path != str(PROJECTOR_PATH.absolute()):
        return
    projector = read_projector(PROJECTOR_PATH.absolute())
    if known != projector:
        catalogue.attach(guide.model_id, projector)


def open_store(data_dir: Path, catalogue: Catalogue, quota_gib: float) -> Store:
    """The models that come from other nodes. Only with the data folder locked: it removes what an earlier
    run left half done."""
    quota_bytes = int(quota_gib * 2**30)
    store = Store(
        catalogue,
        data_dir / "models",
        quota_bytes,
        data_dir / DOWNLOADS,
        data_dir / SEGMENTS,
        data_dir / PROJECTORS,
    )
    if n_strays := store.sweep():
        log.info("%d files and folders of no model removed from %s", n_strays, data_dir)
    return store
