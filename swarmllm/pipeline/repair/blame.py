"""What an origin learns about the nodes of a pipeline from how it ended.

Only the end of a walk that had begun counts: a node that refuses an assignment because it is busy, or has
unloaded its layers a moment ago, has done nothing wrong.
"""

from __future__ import annotations

from swarmllm.errors import ContextFull, NodeBusy, NodeUnreachable
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.swarm.peers.trust import Deed, Note


def judge(chain: Chain, note: Note, suspects: Suspects) -> None:
    """Note the deeds of a chain's nodes, after its end."""
    here = chain.context.view.node_id
    failure = chain.failure
    if failure is None:
        if chain.is_complete:
            for node_id in chain.node_ids - {here}:
                note(node_id, Deed.SERVED)
                suspects.served(node_id)
    elif chain.culprit not in (None, here) and not isinstance(failure, NodeBusy | ContextFull):
        deed = Deed.LOST if isinstance(failure, NodeUnreachable) else Deed.FAILED
        note(chain.culprit, Deed.STALLED if chain.has_stalled else deed, type(failure).__name__)
