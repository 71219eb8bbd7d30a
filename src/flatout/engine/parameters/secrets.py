"""Passwords in addresses, which no log, table or tracking store is to show."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^\s:/@]*):\S*@")
"""Up to the last @: a password may have a slash and an @ of its own."""
_IN_QUERY = re.compile(
    r"([?&](?:passw(?:or)?d|pwd|token|sslpassword)=)[^&\s'\"]*", re.I
)


def without_password(text: str) -> str:
    """`postgresql://ann:***@host/name`."""
    return _IN_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))
