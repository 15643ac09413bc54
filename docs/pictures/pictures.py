"""The pictures of docs/ that show a screen: a terminal with `swaptide top`, a notebook, a report.

`docs/pictures/make` runs this. Programs run for real, and what they show is drawn by Chromium.
"""

import argparse
import fcntl
import html
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
PACKAGE = DOCS.parent / "python" / "src"

# Its parts are read more and more often.
PASSES = """
import time
pages = bytearray(range(256)) * 2**19
for part in 40, 80, 128:
    for turn in range(12):
        sum(pages[:part << 20:4096])
        time.sleep(0.1)
"""

# A program and one that it starts, for a minute.
PAIR = """
import os, random, sys, time
mebibytes = int(sys.argv[1])
if len(sys.argv) > 2 and os.fork() == 0:
    os.execv(sys.executable, [sys.executable, sys.argv[0], sys.argv[2]])
pages = bytearray(range(256)) * (mebibytes << 12)
end = time.monotonic() + 60
while time.monotonic() < end:
    start = random.randrange(len(pages) - (8 << 20))
    sum(pages[start : start + (8 << 20) : 4096])
    time.sleep(0.02)
"""

ROWS, COLUMNS = 18, 150

PAGE = """<!doctype html><meta charset=utf-8><style>
body { margin: 0; padding: 14px; background: #16181d; color: #d6d9de; }
pre { margin: 0; font: 14px/1.28 "DejaVu Sans Mono", monospace; }
</style><pre>%s</pre>"""

# What Chromium draws for the colours that a terminal has names for.
COLORS = {
    "black": "#3b4048",
    "red": "#e06c75",
    "green": "#98c379",
    "brown": "#e5c07b",
    "yellow": "#e5c07b",
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#ffffff",
    "brightblack": "#7f848e",
}

CELLS = (
    "import swaptide\n%load_ext swaptide",
    "%swaptide 256M",
    "import numpy\nframes = [numpy.random.default_rng(n).integers(0, 50, 4_000_000)"
    " for n in range(16)]\nf'{sum(frame.nbytes for frame in frames) >> 20} MiB of numbers'",
    "[int(frame.sum()) for frame in frames[:4]]",
    "%swaptide",
)


def shot(page, to, width, height):
    """Draws a page as Chromium shows it, with few colours."""
    large = to.with_suffix(".large.png")
    words = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    words += [f"--window-size={width},{height}", f"--screenshot={large}", page.as_uri()]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL, timeout=120)
    subprocess.run(["pngquant", "--force", "--output", to, "64", large], check=True)
    large.unlink()
    print(f"{to.relative_to(DOCS.parent)}: {to.stat().st_size >> 10} KB")


def color(name):
    return COLORS.get(name, f"#{name}" if len(name) == 6 else "inherit")


def as_html(screen):
    lines = []
    for row in range(screen.lines):
        line = ""
        for column in range(screen.columns):
            char = screen.buffer[row][column]
            fore, back = (char.bg, char.fg) if char.reverse else (char.fg, char.bg)
            style = "" if fore == "default" else f"color:{color(fore)};"
            if char.reverse and fore == "default":
                style += "color:#16181d;"
            if back != "default" or char.reverse:
                style += f"background:{color(back) if back != 'default' else '#d6d9de'};"
            style += "font-weight:bold;" if char.bold else ""
            text = html.escape(char.data)
            line += f'<span style="{style}">{text}</span>' if style else text
        lines.append(line.rstrip())
    return "\n".join(lines)


def watch(words, env, seconds, key):
    """What a program shows on a terminal after some seconds; then `key` ends it."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    program = subprocess.Popen(
        words, stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True
    )
    os.close(terminal)
    end = time.monotonic() + seconds
    while time.monotonic() < end and program.poll() is None:
        if select.select([main], [], [], 0.1)[0]:
            stream.feed(os.read(main, 1 << 16))
    shown = as_html(screen)
    os.write(main, key)
    program.wait(timeout=10)
    os.close(main)
    return shown


def top(swaptide, place, env):
    script = place / "service.py"
    script.write_text(PAIR)
    swap = ["--swap", "zram:24M", "--swap", f"file:{place}:512M"]
    words = [swaptide, "run", "--ram", "96M", *swap, "--", sys.executable, script, "160", "64"]
    run = subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL)
    try:
        time.sleep(4)
        env = env | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        shown = watch([swaptide, "top", "--color", "always"], env, 20, b"q")
    finally:
        run.terminate()
        run.wait(timeout=30)
    assert "service" in shown or "python" in shown, shown
    page = place / "top.html"
    page.write_text(PAGE % shown)
    shot(page, DOCS / "top.png", 1300, 360)


def notebook(swaptide, place, env):
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    os.environ.update(env | {"PYTHONPATH": str(PACKAGE), "SWAPTIDE": str(swaptide)})
    os.environ["IPYTHONDIR"] = str(place / "ipython")
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    book = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(book, timeout=300, kernel_name="python3").execute()
    text, _ = HTMLExporter(template_name="lab").from_notebook_node(book)
    page = place / "notebook.html"
    page.write_text(text)
    shot(page, DOCS / "notebook.png", 900, 400)


def report(swaptide, place, env):
    script = place / "passes.py"
    script.write_text(PASSES)
    reports = []
    for ram in ("48M", "96M"):
        reports.append(place / f"{ram}.json")
        swap = ["--swap", "zram:6M", "--swap", f"file:{place}:256M"]
        words = [swaptide, "run", "--quiet", "--ram", ram, *swap, "--report", reports[-1], "--"]
        # Debian's own, whatever else is named so.
        plain = env | {"PATH": "/usr/bin:/bin"}
        subprocess.run([*words, "python3", script.name], env=plain, cwd=place, check=True)
    page = place / "runs.html"
    subprocess.run([swaptide, "report", *reports, "--html", page], env=env, check=True)
    shot(page, DOCS / "report.png", 1000, 1750)


def main():
    pictures = {"top": top, "notebook": notebook, "report": report}
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--swaptide", type=Path, required=True)
    words.add_argument("picture", nargs="*", help="top, notebook or report; without: all")
    options = words.parse_args()
    unknown = [name for name in options.picture if name not in pictures]
    if unknown:
        words.error(f"no picture {unknown[0]}")
    place = Path(tempfile.mkdtemp(prefix="swaptide-pictures-"))
    env = os.environ | {"XDG_RUNTIME_DIR": str(place)}
    try:
        for name in options.picture or pictures:
            pictures[name](options.swaptide.resolve(), place, env)
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
