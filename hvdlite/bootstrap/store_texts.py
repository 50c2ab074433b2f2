"""The texts that ranks leave for each other in a store: signed with the job's key where there is one.

    greeting (32) | number (8) | HMAC-SHA256 (32) | body

Rules
- Greeting and number have the same form in every version of hvdlite: a rank with another version can be named and answered.
- The MAC covers the name of the group, the key under which the text stands in the store, and the text before and after it.
  Without a job's key it is made with an empty one: then it proves nothing, and only sets a text of hvdlite off from noise.
- A rank chooses its number at random, and the answer to the rank has it, too: old answers are not taken for new ones.
- Nothing is decoded before its MAC is checked, and no MAC is computed of a text that is longer than those of ranks.
"""

from __future__ import annotations

import dataclasses
import hmac
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from hvdlite._version import __version__
from hvdlite.control.handshake import GREETING_BYTES, Greeting
from hvdlite.core.errors import ProtocolError

_NUMBER: Final = struct.Struct("!Q")
_LENGTH: Final = struct.Struct("!I")
_MAC_BYTES: Final = 32
LONGEST_TEXT: Final = 4096
"""Bytes of a text: a longer one is noise."""
_SIGNED_BYTES: Final = GREETING_BYTES + _NUMBER.size
_BODY_AT: Final = _SIGNED_BYTES + _MAC_BYTES
SECRET_ON_ALL: Final = "set HVDLITE_SECRET to the same value on all ranks, or on none"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Signer:
    """What authenticates the texts of one group.

    Attributes:
        key: the job's; b"" without one.
        group: the group's name.
        how_to_have_a_key: the end of an error's text, for a rank that has none.
    """

    key: bytes
    group: str
    how_to_have_a_key: str = SECRET_ON_ALL

    def mac(self, where: str, signed: bytes, body: bytes, key: bytes | None = None) -> bytes:
        """Return the MAC of a text; with another key if one is given."""
        texts = (b"hvdlite store", self.group.encode("utf-8", "surrogateescape"), where.encode(), signed, body)
        framed = b"".join(_LENGTH.pack(len(text)) + text for text in texts)
        return hmac.digest(self.key if key is None else key, framed, "sha256")


@dataclasses.dataclass(frozen=True)
class Text(Generic[T]):
    """A text from the store.

    Attributes:
        number: that of the rank that has written it, or to which it answers; None if it is not known.
        content: None if the text cannot be used.
        problem: why it cannot; "" otherwise.
    """

    number: int | None
    content: T | None
    problem: str = ""


def sealed(where: str, rank: int, number: int, content: Any, signer: Signer) -> bytes:
    """Return a text.

    Args:
        where: the key under which it will stand in the store.
        rank: its writer.
        number: see `Text`.
    """
    signed, body = Greeting(rank, __version__).encode() + _NUMBER.pack(number), msgspec.msgpack.encode(content)
    return signed + signer.mac(where, signed, body) + body


def opened(text: bytes, where: str, writer: int, reader: int, signer: Signer, kind: type[T]) -> Text[T]:
    """Return what a text says, or why it says nothing.

    Args:
        where: the key under which it stands in the store.
        writer: the rank whose text it should be; for messages, like `reader`.
        kind: the type of its content.
    """
    signed, mac, body = text[:_SIGNED_BYTES], text[_SIGNED_BYTES:_BODY_AT], text[_BODY_AT:]
    try:
        number, = _NUMBER.unpack(signed[GREETING_BYTES:])
        version = Greeting.decode(signed[:GREETING_BYTES]).version
    except (ProtocolError, struct.error):
        return Text(None, None, _noise(text, writer, reader))
    if version != Greeting(reader, __version__).version:
        return Text(number, None, f"rank {writer} runs hvdlite {version}, rank {reader} runs {__version__}; install the "
                                  "same version everywhere")
    if len(text) > LONGEST_TEXT:
        return Text(number, None, _noise(text, writer, reader))
    if not hmac.compare_digest(mac, signer.mac(where, signed, body)):
        is_without = bool(signer.key) and hmac.compare_digest(mac, signer.mac(where, signed, body, b""))
        return Text(number, None, _unsigned(writer, reader, signer, is_without=is_without))
    try:
        return Text(number, msgspec.msgpack.decode(body, type=kind))
    except (ValueError, msgspec.DecodeError, RecursionError):
        return Text(number, None, _noise(text, writer, reader))


def _noise(text: bytes, writer: int, reader: int) -> str:
    return (f"rank {reader} has found {len(text)} bytes that are not of hvdlite {__version__} where rank {writer} writes to "
            "the store: another program writes there, too, or that rank runs an old version")


def _unsigned(writer: int, reader: int, signer: Signer, *, is_without: bool) -> str:
    """Return why a text is not authentic.

    Args:
        is_without: whether the writer has no key, and the reader has one.
    """
    if is_without:
        return (f"rank {reader} has the job's key (HVDLITE_SECRET), and rank {writer} has none: {SECRET_ON_ALL}. A process "
                "that a rank has started after its init() has none, unless you set it")
    if not signer.key:
        return (f"what rank {writer} has written to the store is not signed as rank {reader} does, which has no key: "
                f"another program writes to the store, or rank {writer} has a key: {signer.how_to_have_a_key}")
    return (f"what rank {writer} has written to the store is not signed with the key of rank {reader} (HVDLITE_SECRET): "
            f"{SECRET_ON_ALL}; or another program writes to the store")
