"""Says the details of whose records this node needs: of those with which it runs models."""

from __future__ import annotations

from collections.abc import Collection

from swarmllm.node.placing.auto_shard import AutoShardManager
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.identifiers import NodeId


def used_nodes(
    pipelines: Pipelines, pool: WorkerPool, placing: AutoShardManager, registry: Registry
) -> list[Collection[NodeId]]:
    """Of each model that was asked for here lately, that is held here, or that is placed here, the nodes that
    say they hold layers of it."""
    here = dict.fromkeys((*pool.models(), *placing.model_ids))
    return [*pipelines.needed(), *map(registry.announcers_of, here)]
