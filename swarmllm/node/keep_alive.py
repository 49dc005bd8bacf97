"""How long models stay that were loaded because somebody asked for them. Pure: times come in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from swarmllm.errors import InvalidRequest

FOREVER_S = math.inf
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)", re.ASCII)
MAX_S = 10.0 * 365 * 86400


def parse_keep_alive(said: float | str | None) -> float | None:
    """As Ollama takes it: seconds, or Go's "5m", "1h30m"; negative: for ever. None: not said. Raises
    InvalidRequest naming `keep_alive`."""
    if said is None:
        return None
    if isinstance(said, str):
        text = said.strip()
        sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
        parts = list(_PART.finditer(digits))
        if "".join(part[0] for part in parts) == digits and parts:
            said = sign * sum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
        else:
            try:
                said = float(text)
            except ValueError:
                raise InvalidRequest(
                    f"keep_alive: {text[:40]!r} is neither seconds nor a duration like 5m.",
                    field="keep_alive",
                ) from None
    if math.isnan(said):
        raise InvalidRequest("keep_alive is no number.", field="keep_alive")
    return FOREVER_S if said < 0 or said > MAX_S else said


@dataclass(slots=True)
class _Kept:
    keep_s: float
    since_s: float
    """When its last request ended."""
    n_requests: int = 0
    """Under way."""


class KeepAlive:
    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._kept

    def loaded(self, model_id: str, keep_s: float, now_s: float) -> None:
        self._kept[model_id] = _Kept(keep_s, now_s)

    def begin(self, model_id: str, keep_s: float | None) -> None:
        """A request; `keep_s`: what it says, from now on."""
        if (kept := self._kept.get(model_id)) is not None:
            kept.n_requests += 1
            if keep_s is not None:
                kept.keep_s = keep_s

    def end(self, model_id: str, now_s: float) -> None:
        if (kept := self._kept.get(model_id)) is not None and kept.n_requests:
            kept.n_requests -= 1
            kept.since_s = now_s

    def forget(self, model_id: str) -> None:
        """It is gone, or stays because a person loaded it."""
        self._kept.pop(model_id, None)

    def is_expired(self, model_id: str, now_s: float) -> bool:
        kept = self._kept.get(model_id)
        return kept is not None and not kept.n_requests and kept.since_s + kept.keep_s <= now_s

    def expired(self, now_s: float) -> tuple[str, ...]:
        return tuple(model_id for model_id in self._kept if self.is_expired(model_id, now_s))

    def next_s(self) -> float:
        """When the next one expires unless it is asked; infinity: none does."""
        idle = (kept.since_s + kept.keep_s for kept in self._kept.values() if not kept.n_requests)
        return min(idle, default=math.inf)

    def idle_longest(self) -> str | None:
        """The model that goes first where memory is needed."""
        idle = {model_id: kept.since_s for model_id, kept in self._kept.items() if not kept.n_requests}
        return min(idle, key=lambda model_id: idle[model_id], default=None)

    def expires_in_s(self, model_id: str, now_s: float) -> float | None:
        """None: it was not loaded for a request, or stays for ever."""
        kept = self._kept.get(model_id)
        if kept is None or math.isinf(kept.keep_s):
            return None
        return kept.keep_s if kept.n_requests else max(0.0, kept.since_s + kept.keep_s - now_s)
