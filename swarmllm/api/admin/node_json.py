"""Writes a node's state as JSON: the same facts for /api/admin and for /api/events.

What `swarmllm peers show` and `swarmllm plan` explain is here too.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from swarmllm import __version__
from swarmllm.api.admin.progress import ProgressStream
from swarmllm.api.output.swarm_report import milliseconds, stage_json
from swarmllm.downloads import WaitingView
from swarmllm.errors import InvalidRequest
from swarmllm.models import LayerRange
from swarmllm.models.manifest import MMPROJ_INDEX
from swarmllm.node import ModelView, Node, PeerView, RequestSummary
from swarmllm.node.views import PeerDetails
from swarmllm.pipeline.route.route_planner import DEFAULT_SIZE, RequestSize
from swarmllm.scheduling.plan import Plan
from swarmllm.swarm.peers.trust import EFFECTS, WORK_MIN
from swarmllm.swarm.records.departures import Departed
from swarmllm.swarm.router import Reachability
from swarmllm.workerpool import WorkerStatistics
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import FileAnnounce, NodeCapability

Json = dict[str, object]
HOLDERS_SHOWN = 64
"""Of one model; and of other nodes that give its files."""
RANGES_SHOWN = 64
"""In one list of layer ranges that others announced."""
PEER_MODELS_SHOWN = 16
"""Of one peer, in a list of peers."""


def stats_json(node: Node, models: Iterable[ModelView]) -> Json:
    counts, admission, readiness = node.counts, node.admission, node.readiness()
    models = list(models)
    loaded = [
        {
            "name": view.name,
            "model_id": view.model_id,
            "layers": range_texts(view.loaded),
            "trouble": view.trouble or None,
        }
        for view in models
        if view.loaded
    ]
    projectors = [
        {"name": view.name, "model_id": view.model_id, **view.projector_trouble._asdict()}
        for view in models
        if view.projector_trouble
    ]
    # A model that another node shares is known by its id only.
    placing_names: dict[str, str] = {view.model_id: view.model for view in node.sharing.views()}
    return {
        "node_id": node.node_id,
        "nickname": node.nickname,
        "version": __version__,
        "pid": os.getpid(),
        "uptime_s": round(time.time() - node.started_at, 3),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "tasks_failed": [
            dataclasses.asdict(task) | {"is_down": task.is_down}
            for task in node.supervision.statuses()
            if task.n_failures
        ],
        "scope_failures": {s: n for s, n in node.supervision.scope_failures().items() if n},
        "loop": {
            "longest_step_s": round(node.watchdog.longest_s, 4),
            "slow_steps": node.watchdog.n_slow,
            "latest_slow_step": str(node.watchdog.latest) if node.watchdog.latest else None,
        },
        "ready": readiness.status == "ready",
        "reason": readiness.reason,
        "addresses": node.addresses,
        "peers_connected": len(node.peers()),
        "gpus": [msgspec.to_builtins(gpu) for gpu in node.gpus],
        "reachability": _reachability(node.reachability),
        "port_mapping": dataclasses.asdict(node.port_mapping),
        "dht": node.dht_statistics(),
        "requests": {
            "active": admission.n_active,
            "queued": admission.n_queued,
            "max": admission.max_running,
            "completed": counts.completed,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
        },
        "generated_tokens": node.requests.generated_tokens,
        "models": loaded,
        "projectors": projectors,
        "pipelines": node.pipeline_statistics(),
        "serving": _serving(node, {view.model_id: view.name for view in models}),
        "travel": node.travel_statistics(),
        "placing": [
            {
                "name": placing_names.get(placed.name, placed.name),
                "model_id": placed.model_id,
                "target": range_texts(placed.target),
                "state": placed.state,
            }
            for placed in node.placing.models
        ],
        "workers": [worker_json(worker) for worker in node.worker_statistics()],
    }


def _serving(node: Node, names: Mapping[str, str]) -> list[Json]:
    """`names` of models by their ids."""
    return [
        {
            "name": names.get(served.model_id, ""),
            "model_id": served.model_id,
            "node_id": served.origin,
            "nickname": node.nickname_of(served.origin),
            "layers": range_texts(served.layers),
            "active": served.n_active,
            "requests": served.n_requests,
            "tokens": served.n_tokens,
            "tokens_per_s": round(served.tokens_per_s, 1),
        }
        for served in node.served()
    ]


def _reachability(found: Reachability | None) -> Json | None:
    if found is None:
        return None
    return {
        "checked_at": found.checked_at,
        "asked": found.asked,
        "control": [{"address": address, "reached": reached} for address, reached in found.control],
        "data": [{"address": address, "reached": reached} for address, reached in found.data],
        "observed_ip": found.observed_ip,
    }


def model_json(view: ModelView) -> Json:
    """Lists only the first holders, sources and missing ranges, with their total numbers."""
    entry = view.entry
    manifest = entry.manifest if entry else None
    holders = [
        {
            "node_id": holder.node_id,
            "nickname": holder.nickname,
            "layers": range_texts(holder.layers),
            "is_self": holder.is_self,
        }
        for holder in view.holders[:HOLDERS_SHOWN]
    ]
    return {
        "name": view.name,
        "further_names": entry.further_names if entry else (),
        "model_id": view.model_id,
        "trouble": view.trouble or None,
        "path": str(entry.path) if entry else None,
        "n_parts": max(1, len(entry.parts)) if entry else None,
        "architecture": manifest.architecture if manifest else None,
        "n_layers": view.n_layers,
        "context_length": manifest.context_length if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "cut_alignment": manifest.cut_alignment if manifest else None,
        "whole_reason": manifest.whole_reason if manifest else None,
        "stored": entry.is_stored if entry else view.waiting is not None,
        "pinned": entry.pinned if entry else False,
        "projector": _projector(view),
        "projector_trouble": view.projector_trouble._asdict() if view.projector_trouble else None,
        "encoders": view.encoders[:HOLDERS_SHOWN],
        "takes": sorted(view.takes),
        "files": _files(view.files) if view.files else None,
        "sources": view.sources[:HOLDERS_SHOWN],
        "n_sources": len(view.sources),
        "loaded": range_texts(view.loaded),
        "memory": dataclasses.asdict(view.memory),
        "settings": dataclasses.asdict(view.settings) if view.settings else None,
        "holders": holders,
        "n_holders": len(view.holders),
        "complete": view.complete,
        "missing": range_texts(view.missing[:RANGES_SHOWN]),
        "n_missing": len(view.missing),
        "waiting": _waiting(view.waiting) if view.waiting else None,
    }


def _waiting(waiting: WaitingView) -> Json:
    return {
        "source": waiting.source,
        "size_bytes": waiting.size_bytes,
        "architecture": waiting.architecture,
        "layers": range_texts(waiting.layers),
        "waits_for": waiting.waits_for,
        "contradictions": [{"tensor": tensor, "nodes": nodes} for tensor, nodes in waiting.contradictions],
    }


def _projector(view: ModelView) -> Json | None:
    entry = view.entry
    if entry is None or (projector := entry.attached_projector) is None:
        return None
    return {
        "shard": MMPROJ_INDEX,
        "state": entry.projector_state,
        "is_open": view.is_projector_open,
        "path": projector.path,
        "family": projector.family,
        "n_embd": projector.n_embd,
        "size_bytes": projector.size_bytes,
        "blake3": projector.blake3,
    }


def _files(files: FileAnnounce) -> Json:
    return {
        "layers": _pairs(files.layers),
        "embedding": files.embedding,
        "head": files.head,
    }


def _pairs(pairs: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{start}:{end}" for start, end in pairs[:RANGES_SHOWN]]


def peer_json(view: PeerView, n_shown: int = PEER_MODELS_SHOWN) -> Json:
    """`n_shown`: of the models that it has ready, and of those that it has files of."""
    info, record = view.info, view.record
    announced = record.models if record else ()
    projectors = (record.projectors or ()) if record else ()
    capability = record.capability if record else NodeCapability()
    return {
        "node_id": info.node_id,
        "nickname": record.nickname if record else "",
        "software": record.software if record else "",
        "addresses": info.addresses,
        "rtt_ms": None if info.rtt_s is None else round(info.rtt_s * 1000, 3),
        "data_plane": info.data_plane,
        "bytes_sent": info.bytes_sent,
        "bytes_received": info.bytes_received,
        "bytes_per_s": None if info.bytes_per_s is None else round(info.bytes_per_s),
        "damaged_jobs": view.n_damaged,
        "announced_prefixes": view.n_prefixes,
        "trust": round(view.trust, 4),
        "connected_s": round(trio.current_time() - info.connected_since, 3),
        "memory_total_bytes": capability.memory_total_bytes,
        "memory_free_bytes": capability.memory_free_bytes,
        "gpus": [msgspec.to_builtins(gpu) for gpu in capability.gpus or ()],
        "active_requests": capability.active_requests,
        "max_requests": capability.max_requests,
        "models": [
            {
                "name": model.name,
                "model_id": model.model_id,
                "layers": _pairs(model.ranges),
                "kernel_class": model.kernel_class or "",
            }
            for model in announced[:n_shown]
        ],
        "encodes_for": [each.model_id for each in projectors[:n_shown]],
        "projectors": [
            {"model_id": each.model_id, "shard": MMPROJ_INDEX, "blake3": each.projector}
            for each in projectors[:n_shown]
        ],
        "n_models": len(announced),
        "files": [
            {"name": files.name, "model_id": files.model_id} | _files(files)
            for files in (record.files[:n_shown] if record else ())
        ],
        "n_files": len(record.files) if record else 0,
    }


def departed_json(departed: Departed) -> Json:
    return {
        "node_id": departed.node_id,
        "nickname": departed.nickname,
        "left_at": round(departed.left_at, 3),
        "recently": departed.is_recent(trio.current_time()),
        "models": [
            {"name": name, "layers": _pairs(ranges)} for name, ranges in departed.models[:PEER_MODELS_SHOWN]
        ],
    }


def worker_json(worker: WorkerStatistics) -> Json:
    return dataclasses.asdict(worker) | {
        "loaded": range_texts(worker.loaded),
        "kernels": [msgspec.to_builtins(choice) for choice in worker.kernels],
    }


def range_texts(ranges: tuple[LayerRange, ...]) -> list[str]:
    return [str(layers) for layers in ranges]


def request_json(view: RequestSummary) -> Json:
    return {
        "id": view.id,
        "model": view.model,
        "state": view.state,
        "started_at": round(view.started_at, 3),
        "elapsed_ms": milliseconds(view.elapsed_s),
        "queue_ms": milliseconds(view.queue_s),
        "first_token_ms": None if view.first_token_s is None else milliseconds(view.first_token_s),
        "prompt_tokens": view.n_prompt_tokens,
        "cached_tokens": view.n_cached_tokens,
        "generated_tokens": view.n_generated,
        "tokens_per_s": None if view.tokens_per_s is None else round(view.tokens_per_s, 1),
        "shape": view.shape,
        "route": [stage_json(stage) for stage in view.route],
        "error": view.error,
    }


def loading_json(node: Node) -> list[Json]:
    """Models that are loaded because requests ask for them."""
    return [
        {"model": each.model, "phase": each.phase, "done": each.done, "total": each.total}
        for each in node.provisioner.under_way
    ]


def work_json(work: ProgressStream[Any]) -> Json:
    done_bytes, total_bytes, phase = work.latest
    return {
        "kind": work.kind,
        "model": work.subject,
        "phase": phase,
        "done_bytes": done_bytes,
        "total_bytes": total_bytes,
    }


MODELS_SHOWN = 256
"""Of the node: all that a record has room for."""


def details_report(details: PeerDetails) -> Json:
    trust, record = details.trust, details.record
    return {
        "node_id": details.node_id,
        "nickname": record.nickname if record else "",
        "connected": peer_json(details.connected, MODELS_SHOWN) if details.connected else None,
        "trust": {
            "score": round(trust.score, 4),
            "work_min": WORK_MIN,
            "may_work": trust.may_work,
            "listed": trust.listed,
            "counts": trust.counts,
            "recent": [
                {
                    "at": entry.at,
                    "event": entry.trust_event,
                    "meaning": EFFECTS[entry.trust_event].meaning,
                    "detail": entry.detail,
                    "score": round(entry.score, 4),
                }
                for entry in trust.recent
            ],
        },
    }


MAX_TOKENS = 2**20


def read_size(arguments: Mapping[str, str]) -> tuple[str, RequestSize]:
    """(model, size) from a query string. Raises InvalidRequest naming the field."""
    unknown = set(arguments) - {"model", "prompt_tokens", "output_tokens"}
    if unknown:
        name = min(unknown)
        raise InvalidRequest(
            f"{name[:80]!r} is unknown; known are model, prompt_tokens, output_tokens.", field=name[:80]
        )
    model = arguments.get("model", "")
    if not model:
        raise InvalidRequest("model is missing: name the model to plan for.", field="model")
    return model, RequestSize(
        _count(arguments, "prompt_tokens", DEFAULT_SIZE.n_prompt_tokens),
        _count(arguments, "output_tokens", DEFAULT_SIZE.n_output_tokens),
    )


def plan_report(model: str, size: RequestSize, plan: Plan, nickname_of: Callable[[NodeId], str]) -> Json:
    def on(node_id: NodeId) -> Json:
        return {"node_id": node_id, "nickname": nickname_of(node_id)}

    def with_layers(node_id: NodeId, layers: LayerRange) -> Json:
        return on(node_id) | {"layers": str(layers)}

    return {
        "model": model,
        "prompt_tokens": size.n_prompt_tokens,
        "output_tokens": size.n_output_tokens,
        "cost_s": plan.cost_s,
        "ends_s": plan.ends_s,
        "exact": plan.is_exact,
        "stages": [
            with_layers(stage.node_id, stage.layers)
            | {
                "rows_come_as": plan.row_formats[index] if plan.row_formats else "f32",
                "compute_s": stage.compute_s,
                "network_s": stage.network_s,
                "measured": stage.is_measured,
                "lacks": stage.lacks,
                "standby": stage.standby,
                "alternatives": [
                    with_layers(other.node_id, other.layers)
                    | {"extra_s": other.extra_s, "full": other.is_full}
                    for other in stage.alternatives
                ],
            }
            for index, stage in enumerate(plan.stages)
        ],
        "rivals": [
            {
                "name": rival.name,
                "cost_s": rival.cost_s,
                "stages": [with_layers(stage.node_id, stage.layers) for stage in rival.stages],
            }
            for rival in plan.rivals
        ],
        "refused": [
            with_layers(refusal.node_id, refusal.layers) | {"reason": refusal.reason}
            for refusal in plan.refused
        ],
    }


def _count(arguments: Mapping[str, str], name: str, default: int) -> int:
    text = arguments.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= MAX_TOKENS):
        raise InvalidRequest(f"{name} must be a whole number from 1 to {MAX_TOKENS}.", field=name)
    return int(text)
