"""Passwords in addresses, which no log, table or tracking store is to show."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(://[^\s:/@]*):[^\s/]*@")


def without_password(text: str) -> str:
    """`postgresql://ann:***@host/name`."""
    return _PASSWORD.sub(r"\1:***@", text)
