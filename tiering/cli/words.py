"""How the command writes: sizes, ages, counts, tables, JSON. Prints to stdout, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson


def printable(text: str) -> str:
    """`text` with whatever a terminal or JSON cannot have written as escapes."""
    return text if text.isprintable() else ascii(text)[1:-1]


def count(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def size(size_bytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes} B"


def age(now: float, then: float | None) -> str:
    if then is None:
        return "-"
    seconds = max(now - then, 0)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def print_json(value: object) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
