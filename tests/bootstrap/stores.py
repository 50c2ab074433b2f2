"""A store of threads, and what ranks say in it."""

from __future__ import annotations

import datetime
import tempfile
import threading

from hvdlite.bootstrap.store_texts import Signer, sealed

HANGS_SECONDS = 60.0
KEY = b"k" * 32


class DictStore:
    """A store of threads, with as much of torch's as is used."""

    def __init__(self, seconds: float = HANGS_SECONDS) -> None:
        self.timeout = datetime.timedelta(seconds=seconds)
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], self.timeout)
        return self.values[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError(f"wait timeout\nkeys: {keys}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def signer(key: bytes = b"", name: str = "the group") -> Signer:
    """Return what signs the texts of a group."""
    return Signer(key, name)


def said(rank: int, size: int, host: str = "", key: bytes = b"", name: str = "the group") -> bytes:
    """Return what a rank says of itself."""
    return sealed(f"hvdlite/{rank}", rank, 7, [size, host, "192.0.2.7", tempfile.gettempdir(), False, ""], signer(key, name))
