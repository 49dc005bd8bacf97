"""Models that travel: what a node lacks of a model it fetches from the nodes that have it, and it gives what
it has to whoever asks. `plan` decides who fetches what, `fetch` does it, `uploads` is the other end,
`travel` what the node uses.
"""

from __future__ import annotations

from swarmllm.transfer.model_transfer import ModelTransfer, TransferStatistics
from swarmllm.transfer.settings import TransferSettings

__all__ = ["ModelTransfer", "TransferSettings", "TransferStatistics"]
