"""Texts of rows in one line of a log or a table."""


def cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def printable(text: str) -> str:
    """Return one line, without characters that control a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
