"""A program in a terminal, as pictures: runs it in a pseudo terminal and reads its screen with pyte."""

from __future__ import annotations

import fcntl
import html
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

import pyte

COLORS = {
    "default": "#d6dbe1",
    "black": "#5c6670",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "yellow": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#56d4dd",
    "white": "#f0f3f6",
}


def screen_of(
    command: Sequence[str],
    until: Callable[[list[str]], bool],
    columns: int = 110,
    lines: int = 12,
    limit_s: float = 120,
) -> pyte.Screen:
    """The screen of a program as soon as `until` holds for its lines, or at its end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    end = time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the program has ended
                break
            if not data:
                break
            for piece in data.splitlines(keepends=True):
                stream.feed(piece)
            if until(list(screen.display)):
                break
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return screen


def as_html(screen: pyte.Screen, title: str) -> str:
    """The screen as a window on a page."""
    rows = [_row(screen, y) for y in range(screen.lines)]
    while rows and not rows[-1].strip():
        rows.pop()
    body = "\n".join(rows)
    return f"""<!doctype html><meta charset="utf-8"><style>
body{{margin:0;padding:16px;background:#fff;display:inline-block}}
.window{{background:#14191f;border-radius:8px;padding:10px 16px 14px;display:inline-block}}
.title{{color:#8b949e;font:12px system-ui,sans-serif;margin-bottom:8px}}
pre{{margin:0;color:#d6dbe1;font:13px/1.5 "DejaVu Sans Mono",monospace}}
</style><div class="window"><div class="title">{html.escape(title)}</div><pre>{body}</pre></div>"""


def _row(screen: pyte.Screen, y: int) -> str:
    parts, last, text = [], None, ""
    for x in range(screen.columns):
        cell = screen.buffer[y][x]
        style = (cell.fg, cell.bold)
        if style != last:
            parts.append(_span(last, text))
            last, text = style, ""
        text += cell.data
    parts.append(_span(last, text.rstrip()))
    return "".join(parts)


def _span(style: tuple[str, bool] | None, text: str) -> str:
    if style is None or not text:
        return ""
    color = COLORS.get(style[0], f"#{style[0]}")
    weight = "bold" if style[1] else "normal"
    return f'<span style="color:{color};font-weight:{weight}">{html.escape(text)}</span>'


if __name__ == "__main__":
    marker = sys.argv[1]
    found = screen_of(sys.argv[3:], lambda lines: any(marker in line for line in lines), columns=int(sys.argv[2]))
    print("\n".join(line.rstrip() for line in found.display))
