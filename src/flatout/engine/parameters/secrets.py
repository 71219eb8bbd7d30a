"""Remove passwords from URLs that appear in logs, tables and tracking stores."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^\s:/@]*):\S*@")
"""Matches the user and password in a URL, up to the last @, because a password can
contain a slash and an @."""
_IN_QUERY = re.compile(
    r"([?&](?:passw(?:or)?d|pwd|token|sslpassword)=)[^&\s'\"]*", re.I
)


def without_password(text: str) -> str:
    """Return `text` with masked passwords, e.g. `postgresql://ann:***@host/name`."""
    return _IN_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))
