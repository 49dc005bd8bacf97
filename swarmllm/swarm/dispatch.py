"""What both routers do alike at their edges: check sizes on the way out, and run the daemon's handlers.

A handler's failure must reach exactly one place: the caller of a request gets it as a `RemoteError`, a
message's is logged. Only errors of our own tree are quoted to another node; of a foreign exception it learns
the type, because its text may hold anything, prompts included.
"""

from __future__ import annotations

import logging

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.router import MessageHandler, RequestHandler
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import RECORD_MAX, REQUEST_MAX, SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX

log = logging.getLogger(__name__)

REASON_MAX = 2000
"""Characters of a failure's reason that travel."""


def check_record(record: bytes) -> None:
    """Raises ValueError unless the record may be published (1 byte .. RECORD_MAX)."""
    if not 0 < len(record) <= RECORD_MAX:
        raise ValueError(f"a record has 1 to {RECORD_MAX} bytes, not {len(record)}")


def check_request(body: bytes) -> None:
    """Raises ValueError above REQUEST_MAX."""
    if len(body) > REQUEST_MAX:
        raise ValueError(f"a request body has at most {REQUEST_MAX} bytes, not {len(body)}")


def check_message(header: bytes, payload: bytes | memoryview) -> int:
    """Size of the message in bytes. Raises ValueError above SWARM_HEADER_MAX or SWARM_PAYLOAD_MAX."""
    payload_bytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if len(header) > SWARM_HEADER_MAX:
        raise ValueError(f"a message header has at most {SWARM_HEADER_MAX} bytes, not {len(header)}")
    if payload_bytes > SWARM_PAYLOAD_MAX:
        raise ValueError(f"a message payload has at most {SWARM_PAYLOAD_MAX} bytes, not {payload_bytes}")
    return len(header) + payload_bytes


class RequestRefused(Exception):
    """Why a request has no response, in words that may travel."""


class UnreadableRequest(RequestRefused):
    """It is not what the protocol allows, so it counts against its sender."""


async def answer(handler: RequestHandler | None, sender: NodeId, body: bytes) -> bytes:
    """The handler's response. Raises RequestRefused whatever goes wrong in it."""
    if handler is None:
        raise RequestRefused("this node does not serve requests yet")
    try:
        response = await handler(sender, body)
    except SwarmLLMError as error:
        raise RequestRefused(error.message[:REASON_MAX]) from error
    except Exception as error:
        provoked_by(log, sender).exception("request from %s failed", sender)
        raise RequestRefused(f"the handler failed with {type(error).__name__}") from error
    if len(response) > REQUEST_MAX:
        raise RequestRefused(f"the response has {len(response)} bytes, more than {REQUEST_MAX}")
    return response


async def deliver(handler: MessageHandler | None, sender: NodeId, header: bytes, payload: memoryview) -> None:
    """Run the handler for one message; nothing it raises gets out, cancellation apart."""
    if handler is None:
        provoked_by(log, sender).debug("message from %s dropped: nothing serves messages yet", sender)
        return
    try:
        await handler(sender, header, payload)
    except Exception:
        provoked_by(log, sender).exception("message from %s failed", sender)
