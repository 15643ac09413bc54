#!/usr/bin/env python3
"""Draws docs/bench.svg: bars of the table in README.md, swaptide and the kernel's zram.

chart.py            writes it
chart.py --check    exit status 1 if it is not what the table says
"""

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs/bench.svg"
ROW = re.compile(r"^\| (\w[^|]*?) \(`\w+`\) \| (\d+) : (\d+) \|", re.M)
WIDTH, LABEL, BAR, GAP, TOP = 820, 330, 16, 14, 56
SIDES = (("swaptide", "#126eaa"), ("kernel zram", "#9a9a9a"))


def picture(rows):
    largest = max(max(values) for _, values in rows)
    height = TOP + len(rows) * (2 * BAR + GAP) + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="22" font-size="15">Throughput in MB/s, longer is better: the program'
        " ...</text>",
    ]
    for number, (name, colour) in enumerate(SIDES):
        x = LABEL + 130 * number
        out.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 18}" y="45">{name}</text>')
    y = TOP
    for label, values in rows:
        out.append(
            f'<text x="{LABEL - 10}" y="{y + BAR + 4}" text-anchor="end">{escape(label)}</text>'
        )
        for value, (_, colour) in zip(values, SIDES, strict=True):
            width = round((WIDTH - LABEL - 70) * value / largest)
            out.append(
                f'<rect x="{LABEL}" y="{y}" width="{width}" height="{BAR - 2}" fill="{colour}"/>'
            )
            out.append(f'<text x="{LABEL + width + 6}" y="{y + BAR - 4}">{value}</text>')
            y += BAR
        y += GAP
    out.append(
        f'<text x="12" y="{height - 10}" font-size="11" fill="#555555">1 GiB of data that'
        " compresses 4:1, in 256 MiB of memory; medians of alternating runs</text>"
    )
    return "\n".join(out) + "\n</svg>\n"


def main():
    text = (ROOT / "README.md").read_text()
    rows = [(name, (int(ours), int(theirs))) for name, ours, theirs in ROW.findall(text)]
    if len(rows) < 4:
        sys.exit("chart: README.md has no table of four rows with MB/s, swaptide : kernel")
    drawn = picture(rows)
    if "--check" not in sys.argv:
        PICTURE.write_text(drawn)
    elif PICTURE.read_text() != drawn:
        sys.exit("chart: docs/bench.svg is not what README.md says; run tests/chart.py")


if __name__ == "__main__":
    main()
