"""Tell the daemon which prompts' beginnings are kept here, whenever that has changed.

Only those of which this worker saw the tokens: then it ran the whole model, and the hashes are the same on
every node. What a chain's origin named has meaning to that origin alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swarmllm_proto import ipc
from swarmllm_proto.ipc_prefix import join_names
from swarmllm_workers.cache.prefix_cache import PrefixCache
from swarmllm_workers.cache.prefixes import Kept

Beginning = tuple[bytes, int]
"""(hash of the last complete block, how many blocks)"""


class PrefixManifest:
    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._n_changes = 0
        self._told: tuple[Beginning, ...] = ()

    def tell(self, prefixes: PrefixCache) -> None:
        """Cheap where nothing has changed."""
        if prefixes.n_changes == self._n_changes:
            return
        self._n_changes = prefixes.n_changes
        kept = beginnings(prefixes)
        if set(kept) != set(self._told):
            self._told = kept
            names = join_names([name for name, _ in kept])
            self._send(ipc.PrefixManifestUpdate(n_blocks=tuple(n for _, n in kept)), [names])


def beginnings(kept: Iterable[Kept]) -> tuple[Beginning, ...]:
    """Each once, the most recently used first."""
    newest_first = sorted(kept, key=lambda each: -each.used_at)
    names = (each.name for each in newest_first if len(each.name.tokens) and each.name.hashes)
    return tuple(dict.fromkeys((name.hashes[-1], len(name.hashes)) for name in names))
