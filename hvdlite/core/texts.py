"""Texts that come from outside: made short and encodable, so that an exception's text of any kind can be sent and shown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

LONGEST_MESSAGE: Final = 1 << 14
"""Characters of an exception's text that other ranks and the launcher get."""
LONGEST_TRACEBACK: Final = 1 << 16
"""Characters of a traceback that they get."""


def encodable(text: str) -> str:
    """Return a text with lone surrogates, which no encoding has, as escapes (Python decodes odd bytes of paths to them)."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All characters that a terminal may obey, but for tabs and the ends of lines."""


def printable(text: str) -> str:
    """Return a text with control characters as escapes: on a terminal, those of another program could do anything."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def shortened(text: str, limit: int) -> str:
    """Return an encodable text of about `limit` characters at most: the middle of a longer one is left out."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out ...]\n{text[-half:]}"
    return encodable(text)


def text_of(error: BaseException) -> str:
    """Return an exception's text, shortened; its `__str__` may fail, too."""
    try:
        return shortened(str(error), LONGEST_MESSAGE)
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def with_texts(value: Any, changed: Callable[[str], str]) -> Any:
    """Return a message with all its texts replaced by what `changed` makes of them."""
    if isinstance(value, str):
        return changed(value)
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: with_texts(getattr(value, name), changed) for name in value.__struct_fields__})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: with_texts(getattr(value, field.name), changed)
                              for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {with_texts(key, changed): with_texts(each, changed) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_texts(each, changed) for each in value)
    return value
