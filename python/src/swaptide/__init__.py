"""Run Python in less memory than it needs.

`limit` puts the running interpreter, and what it starts, under a memory budget: the program
`swaptide` swaps out what does not fit. `budget` does so for a block, `run` for another program, and
`stats` says what was swapped out.

    import swaptide

    swaptide.limit("2G")
    with swaptide.budget("512M"):
        ...
    print(swaptide.stats())
    swaptide.run(["sort", "-o", "sorted", "words"], ram="1G")
"""

from swaptide._binary import binary
from swaptide._errors import BinaryNotFoundError, NotLimitedError, RefusedError, SwaptideError
from swaptide._limit import budget, limit, name_inherited_run, release, stats
from swaptide._magic import load_ipython_extension, unload_ipython_extension
from swaptide._run import CompletedProcess, run
from swaptide._stats import ProcessStats, Report, Stats

__version__ = "0.2.0"

__all__ = [
    "BinaryNotFoundError",
    "CompletedProcess",
    "NotLimitedError",
    "ProcessStats",
    "RefusedError",
    "Report",
    "Stats",
    "SwaptideError",
    "__version__",
    "binary",
    "budget",
    "limit",
    "load_ipython_extension",
    "release",
    "run",
    "stats",
    "unload_ipython_extension",
]

name_inherited_run()
