"""Starts the daemon's tasks, and defines what the failure of each means."""

from swarmllm.supervision.outcome import Outcome, detach
from swarmllm.supervision.policy import TaskStatus
from swarmllm.supervision.runner import (
    EssentialTaskFailed,
    Supervision,
    contained,
    current,
    spawn,
    supervise,
    supervise_started,
)
from swarmllm.supervision.table import SCOPES, TASKS, LongLived, Scope

__all__ = [
    "SCOPES",
    "TASKS",
    "EssentialTaskFailed",
    "LongLived",
    "Outcome",
    "Scope",
    "Supervision",
    "TaskStatus",
    "contained",
    "current",
    "detach",
    "spawn",
    "supervise",
    "supervise_started",
]
