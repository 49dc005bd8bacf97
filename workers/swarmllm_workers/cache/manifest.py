"""Tells the daemon which prompts' beginnings are kept here, whenever that has changed.

Only those of which this worker saw the tokens: then it ran the whole model, and every node that may know
makes the same names. What a chain's origin named has meaning to that origin alone. What came from another
node and was not checked is not this worker's to tell.

A prompt seldom goes on as the kept one did: what is common is its beginning, a system prompt say. So shorter
beginnings of each entry are told, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from swarmllm_proto import ipc
from swarmllm_proto.ipc.kv import join_names
from swarmllm_workers.cache.prefix_cache import PrefixCache
from swarmllm_workers.cache.prefixes import Kept

MANIFEST_MAX: Final = 64
"""Beginnings in one message: as many as a node announces."""
Beginning = tuple[bytes, int]
"""(hash of the last complete block, how many blocks)"""


class PrefixManifest:
    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._n_changes = 0
        self._published: tuple[Beginning, ...] = ()

    def tell(self, prefixes: PrefixCache) -> None:
        """Send the list if it has changed. Costs little if nothing has changed."""
        if prefixes.n_changes == self._n_changes:
            return
        self._n_changes = prefixes.n_changes
        kept = beginnings(prefixes)
        if set(kept) != set(self._published):
            self._published = kept
            names = join_names([name for name, _ in kept])
            self._send(ipc.PrefixManifestUpdate(n_blocks=tuple(n for _, n in kept)), [names])


def beginnings(kept: Iterable[Kept]) -> tuple[Beginning, ...]:
    """The names to announce, MANIFEST_MAX at most and each once: all own entries, the most recently used
    first, and then shorter prefixes of them, for prompts that continue differently; the coarse ones first."""
    newest_first = sorted(kept, key=lambda each: -each.used_at)
    told = [each for each in newest_first if len(each.name.tokens) and each.name.hashes and each.is_own]
    found = dict.fromkeys((each.name.hashes[-1], len(each.name.hashes)) for each in told)
    step = 1 << MANIFEST_MAX.bit_length()
    while step and len(found) < MANIFEST_MAX:
        for each in told:
            for n_blocks in range(step, len(each.name.hashes), step):
                if not each.n_min:
                    found.setdefault((each.name.hashes[n_blocks - 1], n_blocks))
        step //= 2
    return tuple(found)[:MANIFEST_MAX]
