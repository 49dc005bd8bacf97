"""The thin driver that keeps a Registry in step with a Router.

It looks at all records whenever anything changed, rather than at the one the change names: changes may be
lost when their reader is slow, records never are, and comparing a few thousand identities takes well under a
millisecond. Between two records that it takes over, others have their turn: one record is at most
`limits.RECORD_MAX` bytes, how many come at once is not bounded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from swarmllm.log_filter import provoked_by
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)


async def follow_router(
    registry: Registry, router: Router, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run for ever; started once the registry holds everything the router knew at the call."""
    async with router.changes() as changes:
        await _catch_up(registry, router)
        task_status.started()
        async for _ in changes:
            await _catch_up(registry, router)


async def _catch_up(registry: Registry, router: Router) -> None:
    records = dict(router.records().items())
    await _take_over_connections(registry, router)
    for node_id in [each for each in registry.announcers() if each not in records]:
        registry.forget(node_id)
    for node_id in [n for n, record in records.items() if registry.content(n) is not record]:
        _apply(registry, node_id, records[node_id])
        await trio.lowlevel.checkpoint()
    await _take_over_connections(registry, router)


async def _take_over_connections(registry: Registry, router: Router) -> None:
    """One node at a time, those that have left first: each takes its announcements along."""
    known, now = registry.connected(), router.connected()
    for node_id in (*(known - now), *(now - known)):
        registry.set_present(node_id, node_id in now)
        await trio.lowlevel.checkpoint()


def _apply(registry: Registry, node_id: NodeId, record: bytes) -> None:
    try:
        registry.apply(node_id, record)
    except ProtocolError as error:
        provoked_by(log, node_id).warning("record of node %s refused: %s", node_id, error)
