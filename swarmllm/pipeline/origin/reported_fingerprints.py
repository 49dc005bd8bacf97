"""Keeps the fingerprints of logits and the log-probabilities that a last stage sends with its tokens, for a
check. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import UnsetType

from swarmllm.pipeline.origin.output import InvalidReport
from swarmllm_proto.fingerprints import check_fingerprint, decode_fingerprint
from swarmllm_proto.ipc import Sampling, TokenLogprob
from swarmllm_proto.tensors import Tensor


class ReportedFingerprints:
    """The fingerprints of one attempt's tokens, in their order."""

    def __init__(self, sampling: Sampling, *, is_kept: bool) -> None:
        """`sampling`: with the key that the stage was given. `is_kept`: somebody will look at them."""
        self._is_asked = sampling.fingerprint_key is not None
        self._is_kept = is_kept
        self._is_due = False
        self._n_tokens = 0
        self._tells = False
        self._reported: list[bytes] = []
        self._newest = b""
        self._logprobs: list[tuple[TokenLogprob, ...]] = []

    def expect(self) -> None:
        """The stage has announced that it tells them."""
        self._is_due = True

    def take(self, fingerprint: bytes | UnsetType, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """With the next token. Raises InvalidReport for one that is none, and where the stage tells those
        of some tokens only, or of none although it has announced that it tells them."""
        if not self._is_asked:
            return
        tells = not isinstance(fingerprint, UnsetType)
        if self._is_due and not tells:
            raise InvalidReport("no fingerprint comes with a token")
        if self._n_tokens and tells is not self._tells:
            raise InvalidReport("fingerprints come with some of the tokens")
        self._tells, self._n_tokens = tells, self._n_tokens + 1
        if isinstance(fingerprint, UnsetType):
            return
        try:
            check_fingerprint(fingerprint)
        except ValueError as error:
            raise InvalidReport(f"a fingerprint of {error}") from None
        self._newest = fingerprint
        if self._is_kept:
            self._reported.append(fingerprint)
            self._logprobs.append(logprobs)

    @property
    def newest(self) -> Tensor | None:
        """f32 [N_VALUES], of the last token; None: none was told."""
        return decode_fingerprint(self._newest) if self._newest else None

    def read(self, first: int, n: int) -> Tensor | None:
        """f32 [n, N_VALUES] of the tokens from `first` on, by their order; None: they were not told."""
        reported: Sequence[bytes] = self._reported[first : first + n]
        return (
            np.stack([decode_fingerprint(each) for each in reported])
            if reported and len(reported) == n
            else None
        )

    def logprobs(self, first: int, n: int) -> Sequence[tuple[TokenLogprob, ...]]:
        """Of the same tokens: of each its own, then the likeliest ones; empty where they were not told."""
        return self._logprobs[first : first + n]
