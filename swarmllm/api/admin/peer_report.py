"""What `swarmllm peers show` explains about one node, as JSON."""

from __future__ import annotations

from swarmllm.api.admin.node_json import Json, peer_json
from swarmllm.node.views import PeerDetails
from swarmllm.swarm.peers.trust import EFFECTS, WORK_MIN

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
                    "deed": entry.deed,
                    "meaning": EFFECTS[entry.deed].meaning,
                    "detail": entry.detail,
                    "score": round(entry.score, 4),
                }
                for entry in trust.recent
            ],
        },
    }
