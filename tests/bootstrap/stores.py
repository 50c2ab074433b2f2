"""A store of threads, and what ranks say in it."""

from __future__ import annotations

import tempfile
import threading

from hvdlite.bootstrap.store_texts import Signer, sealed

HANGS_SECONDS = 60.0
KEY = b"k" * 32


class DictStore:
    """A store of threads.

    Attributes:
        texts: by key.
    """

    host, where = "", ""

    def __init__(self, seconds: float = HANGS_SECONDS) -> None:
        self.seconds = seconds
        self.texts: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self.texts[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.texts, seconds)
            return self.texts.get(key)

    def forget(self, key: str) -> None:
        self.texts.pop(key, None)


def signer(key: bytes = b"", name: str = "the group") -> Signer:
    """Return what signs the texts of a group."""
    return Signer(key, name)


def said(rank: int, size: int, host: str = "", key: bytes = b"", name: str = "the group") -> bytes:
    """Return what a rank says of itself."""
    return sealed(f"hvdlite/{rank}", rank, 7, [size, host, "192.0.2.7", tempfile.gettempdir(), False, ""], signer(key, name))
