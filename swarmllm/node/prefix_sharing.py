"""What of the workers' kept KV is told to the swarm: of models that run here whole, and not too much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmllm.swarm.records.prefix_index import NODE_PREFIXES_MAX
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.swarm import KeptPrefix, PrefixCacheAnnounce, ShardAnnounce
from swarmllm_proto.swarm_prefix import PREFIX_MODELS_MAX


def prefix_announcements(
    kept: Mapping[ModelId, tuple[KeptPrefix, ...]], ready: Iterable[ShardAnnounce]
) -> tuple[PrefixCacheAnnounce, ...]:
    """`kept`: by model id, the most recently used first. Where there are too many, every model has an equal
    share of the room."""
    whole = [model.model_id for model in ready if model.ranges == ((0, model.n_layers),)]
    told = [model_id for model_id in whole if kept.get(model_id)][:PREFIX_MODELS_MAX]
    if not told:
        return ()
    n_each = NODE_PREFIXES_MAX // len(told)
    return tuple(
        PrefixCacheAnnounce(model_id=model_id, prefixes=kept[model_id][:n_each]) for model_id in told
    )
