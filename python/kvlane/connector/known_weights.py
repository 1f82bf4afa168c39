"""The scheduler role's knowledge of the weights to which the engine's blocks belong.

    at start: known --- reset ---> unknown --- the first step with requests asks the workers ---> known
                 ^                                                                                 |
                 +---------------------------------------------------------------------------------+

While the weights are unknown, the engine neither looks up nor saves. The workers answer with labels
(`kvlane.connector.weights`). The labels make a key that is mixed into the blocks' hashes, so engines with equal keys
find each other's blocks. The weights of the files have no key.
"""

from __future__ import annotations

import hashlib
import os

from kvlane.connector.weights import STARTED_WITH, WeightsReport

# A request waits this long for the workers' answer, and is computed without the cache then.
PATIENCE_SECONDS = 2.0


class KnownWeights:
    """The present weights of one engine."""

    def __init__(self, started_with: str, workers: int) -> None:
        """`started_with` is the user's name of the first weights, or empty for what their files say."""
        self._first_key = version_key(started_with) if started_with else None
        self._workers = workers
        self._life = os.urandom(16)
        self._resets = 0
        self._asked: int | None = None
        self._unknown_since: float | None = None
        self.key: bytes | None = self._first_key
        """The key that is mixed into the hashes of blocks; None for the weights that the namespace names."""

    @property
    def are_known(self) -> bool:
        """Whether the key says what the engine computes with."""
        return self._unknown_since is None

    def is_worth_waiting(self, now: float) -> bool:
        """Whether a request should wait for the workers' answer. The time runs from the first call after a reset,
        because the engine may have slept in between."""
        if self._unknown_since == 0.0:
            self._unknown_since = now
        return self._unknown_since is not None and now - self._unknown_since < PATIENCE_SECONDS

    def forget(self) -> None:
        """Draws a random key after a reset, because the weights may be others from here on."""
        self._resets += 1
        self._asked = None
        self._unknown_since = 0.0
        # A random key, so no lookup finds what is hashed until the answer.
        self.key = os.urandom(16)

    def question(self) -> int | None:
        """The reset after which the workers are to digest their weights, once for each reset. Called only when requests
        run, because weights may change until then."""
        if self.are_known or self._asked == self._resets:
            return None
        self._asked = self._resets
        return self._resets

    def answer(self, report: WeightsReport) -> bool:
        """Takes the ranks' report. True if the engine's weights are known now."""
        if self.are_known or report.reset != self._resets or len(report.labels) < self._workers:
            return False
        self._unknown_since = None
        labels = {label for _, label in report.labels}
        if None in labels:
            # The key that was drawn at the reset stays: these blocks are this engine's alone, until its next reset.
            return True
        if labels == {STARTED_WITH}:
            self.key = self._first_key
        elif len(labels) == 1 and (label := labels.pop()) is not None and label.startswith("version "):
            self.key = version_key(label.removeprefix("version "))
        else:
            # A key of this engine's life alone, because these labels mean nothing elsewhere.
            labels_text = repr(sorted(report.labels, key=lambda pair: pair[0]))
            self.key = hashlib.blake2b(labels_text.encode(), key=self._life, digest_size=16).digest()
        return True


def version_key(name: str) -> bytes:
    """The key of weights that a user or trainer has named; the same in all engines."""
    return hashlib.blake2b(name.encode(), person=b"kvlane weights", digest_size=16).digest()
