"""Texts that come from outside: made short and encodable, so that an exception's text of any kind can be sent."""

from __future__ import annotations

from typing import Any, Final

import msgspec

LONGEST_MESSAGE: Final = 1 << 14
"""Characters of an exception's text that other ranks and the launcher get."""
LONGEST_TRACEBACK: Final = 1 << 16
"""Characters of a traceback that they get."""


def encodable(text: str) -> str:
    """Return a text with lone surrogates, which no encoding has, as escapes (Python decodes odd bytes of paths to them)."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


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


def with_encodable_texts(value: Any) -> Any:
    """Return a message with all its texts encodable."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: with_encodable_texts(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, dict):
        return {with_encodable_texts(key): with_encodable_texts(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_encodable_texts, value))
    return value
