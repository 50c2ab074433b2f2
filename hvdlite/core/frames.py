"""Messages as frames on a stream: a length of 4 bytes, and MessagePack, decoded as given types, never pickled."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.texts import encodable, with_texts

_LENGTH: Final = struct.Struct("!I")
_ENCODER: Final = msgspec.msgpack.Encoder()


def to_frame(message: msgspec.Struct, limit: int) -> bytes:
    """Return a message as a frame.

    Raises:
        ProtocolError: when it has more than `limit` bytes.
    """
    try:
        body = _ENCODER.encode(message)
    except UnicodeEncodeError:
        body = _ENCODER.encode(with_texts(message, encodable))
    if len(body) > limit:
        raise ProtocolError(f"{type(message).__name__} has {len(body)} bytes; the limit is {limit}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages.

    Args:
        decoder: of the types that are expected.
        limit: bytes of the longest frame.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], limit: int) -> None:
        self._decoder, self._limit = decoder, limit
        self._unread = bytearray()

    def feed(self, content: bytes) -> list[Any]:
        """Add bytes, and return the messages that they complete.

        Raises:
            ProtocolError: for a frame that is no message.
        """
        self._unread += content
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes; the limit is {self._limit}")
            end = _LENGTH.size + length
            if len(self._unread) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._unread[_LENGTH.size:end])))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
                raise ProtocolError(f"not a message: {error}") from None
            del self._unread[:end]
        return messages
