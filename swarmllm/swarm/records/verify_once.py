"""Signatures, checked once each.

A signature costs a tenth of a millisecond, and the same statement arrives several times: gossip is checked
before it is passed on and read after it, and what gossip brought comes again when two nodes compare what they
know.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from swarmllm_proto.envelope import Verify
from swarmllm_proto.identifiers import NodeId

KEPT_MAX = 4096
"""Verdicts, those asked for last: about 1 MiB."""


class VerifyOnce:
    """A `Verify` that remembers what it has found out, right or wrong."""

    def __init__(self, verify: Verify, kept_max: int = KEPT_MAX) -> None:
        self._verify = verify
        self._kept_max = kept_max
        self._verdicts: OrderedDict[tuple[str, bytes, bytes], bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verdicts)

    def __call__(self, node_id: NodeId, content: bytes, signature: bytes) -> bool:
        # A hash stands for the content: a thousand records would be too much to keep.
        key = (node_id, signature, hashlib.sha256(content).digest())
        verdict = self._verdicts.pop(key, None)
        if verdict is None:
            verdict = self._verify(node_id, content, signature)
        self._verdicts[key] = verdict
        if len(self._verdicts) > self._kept_max:
            self._verdicts.popitem(last=False)
        return verdict
