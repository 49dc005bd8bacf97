"""Messages about where a model may be cut whose architecture is not in the table (`architectures`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarmllm_proto.ipc_base import DaemonMessage, LayerIndex, WorkerMessage


class CheckCuts(DaemonMessage, frozen=True, tag=True):
    """Try which cuts of the open model, of which the whole file must be there, compute the same as the uncut
    model. Answered by Progress ... CutsChecked."""

    units: Annotated[tuple[Annotated[int, Meta(ge=1, le=65535)], ...], Meta(max_length=64)] = ()
    """Layers per part to try, in this order; none: those that the model's number of layers suggests."""


class CutsChecked(WorkerMessage, frozen=True, tag=True):
    """Answers CheckCuts."""

    cut_alignment: LayerIndex
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: Annotated[str, Meta(max_length=2000)] = ""
    """Why, where cut_alignment is 0."""
