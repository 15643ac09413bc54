"""The documents, and the blocks of lines in them that a reader may copy."""

import functools
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name / "README.md" for name in ("packaging", "python", "python/examples", "fuzz")),
]


@functools.cache
def blocks(document):
    """The indented blocks of a document, without their indentation; none of a block in a fence."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.M | re.S)
    found = re.findall(r"(?<=\n\n)(?: {4}.*\n(?:\n(?= {4}))?)+", text)
    # The text of a list's item is indented by less; its blocks by that and four.
    return [textwrap.dedent(block) for block in found]


def block(document, start):
    """The one block that begins so."""
    (only,) = [text for text in blocks(document) if text.startswith(start)]
    return only


def commands(document, start):
    """The commands of a block of one line each; what stands behind more blanks is a comment."""
    lines = [line for line in block(document, start).splitlines() if line[:1].strip()]
    return [re.split(" {3,}", line)[0] for line in lines]
