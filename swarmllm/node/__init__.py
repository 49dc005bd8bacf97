"""The running node: `Node`, the one object behind the HTTP API, and the views it
gives.
"""

from __future__ import annotations

from swarmllm.node.admission import Admission
from swarmllm.node.node import Node
from swarmllm.node.user_requests import RequestSummary
from swarmllm.node.views import HolderView, ModelView, PeerView, Readiness, RequestCounts

__all__ = [
    "Admission",
    "HolderView",
    "ModelView",
    "Node",
    "PeerView",
    "Readiness",
    "RequestCounts",
    "RequestSummary",
]
