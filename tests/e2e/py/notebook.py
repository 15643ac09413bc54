"""Runs a notebook whose kernel is in a memory cgroup: notebook.py KERNEL CGROUP MIB.

The last line is `OK notebook` or, where the kernel dies, `DEAD`.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

LIVE = 3
"""The cell during which the line is written."""
CELLS = (
    "import random, time, swaptide\n"
    "pieces = {n: random.Random(n).randbytes(1 << 20) for n in range(MIB)}",
    "%load_ext swaptide",
    "%swaptide",
    "budget = swaptide.stats().budget_bytes\n"
    "swaptide.limit(budget - (16 << 20))\n"
    "time.sleep(4)\n"
    "swaptide.limit(budget)\n"
    "print(*[process.pid for process in swaptide.stats().processes])",
    "assert all(random.Random(n).randbytes(64) == piece[:64] for n, piece in pieces.items())\n"
    "print('right')",
)


class Watched(NotebookClient):
    """Notes the lines that are written in place of others, with the cell that runs."""

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "update_display_data":
            lines.append((cell_index, msg["content"]["data"]["text/plain"]))
        return super().process_message(msg, cell, cell_index)


lines = []


def main():
    kernel, cgroup, mebibytes = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

    def enter():
        (cgroup / "cgroup.procs").write_text("0")

    cells = [nbformat.v4.new_code_cell(cell.replace("MIB", mebibytes)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = Watched(notebook, timeout=600, kernel_name=kernel)
    try:
        client.execute(preexec_fn=enter)
    except DeadKernelError:
        print("DEAD")
        return
    (line,) = [output["data"]["text/plain"] for output in cells[2].outputs]
    print(line, lines, cells[LIVE].outputs, sep="\n")
    live = [line for index, line in lines if index == LIVE]
    budgets = [line.split(" of ")[1].split(" in ")[0] for line in live]
    assert len(set(budgets)) == 2, "it shows what is true while the cell runs, and afterwards"
    assert line == lines[-1][1]
    assert cells[-1].outputs[0]["text"] == "right\n", cells[-1].outputs
    print("OK notebook")


if __name__ == "__main__":
    main()
