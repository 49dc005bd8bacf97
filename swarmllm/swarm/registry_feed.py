"""The thin driver that keeps a Registry in step with a Router.

It looks at all records whenever anything changed, rather than at the one the change names: changes may be
lost when their reader is slow, records never are, and comparing a few thousand identities takes well under a
millisecond.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from swarmllm.swarm.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.errors import ProtocolError

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)


async def follow_router(
    registry: Registry, router: Router, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run for ever; started once the registry holds everything the router knew at the call."""
    seen: dict[str, bytes] = {}
    async with router.changes() as changes:
        _catch_up(registry, router, seen)
        task_status.started()
        async for _ in changes:
            _catch_up(registry, router, seen)


def _catch_up(registry: Registry, router: Router, seen: dict[str, bytes]) -> None:
    records = router.records()
    for node_id in seen.keys() - records.keys():
        del seen[node_id]
        registry.forget(node_id)
    for node_id, record in records.items():
        if seen.get(node_id) is not record:
            seen[node_id] = record
            _apply(registry, node_id, record)
    registry.set_connected(router.connected())


def _apply(registry: Registry, node_id: str, record: bytes) -> None:
    try:
        registry.apply(node_id, record)
    except ProtocolError as error:
        log.warning("record of node %s refused: %s", node_id, error)
