"""Transfers of models between nodes: a node fetches what it lacks of a model, and serves what it has.

`fetch_plan` decides which tensor comes from which node, `fetch` fetches it, `uploads` serves others, and
`model_transfer` is what the node uses.
"""

from __future__ import annotations

from swarmllm.transfer.model_transfer import ModelTransfer, TransferStatistics
from swarmllm.transfer.settings import TransferSettings

__all__ = ["ModelTransfer", "TransferSettings", "TransferStatistics"]
