"""`swaptide kernelspec install`: Jupyter kernels that run under a budget."""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from swaptide._binary import ask, binary
from swaptide._errors import SwaptideError

_BAD_INPUT = 2
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


class _Parser(argparse.ArgumentParser):
    """With errors of one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(_BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="swaptide kernelspec", description="Jupyter kernels under a budget.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    install = commands.add_parser(
        "install",
        help="install a kernel that swaptide runs",
        description="Installs a copy of a Jupyter kernel that runs under a memory budget. "
        "jupyter kernelspec remove NAME removes it.",
    )
    install.add_argument(
        "--ram", required=True, metavar="SIZE", help="the budget: 2G, or 50%% of the memory"
    )
    install.add_argument(
        "--kernel",
        default="python3",
        metavar="NAME",
        help="the kernel to copy (default: python3, the one of this Python)",
    )
    install.add_argument(
        "--name", metavar="NAME", help="the name of the new one (default: swaptide-KERNEL)"
    )
    install.add_argument(
        "--display-name", metavar="TEXT", help="what Jupyter shows (default: KERNEL (swaptide RAM))"
    )
    install.add_argument(
        "--swap",
        action="append",
        default=[],
        metavar="DEV",
        help="a swap area, as for swaptide run --swap; repeat for more",
    )
    install.add_argument(
        "--force", action="store_true", help="replace a kernel that is not one of swaptide's"
    )
    place = install.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for this user (default)")
    place.add_argument("--sys-prefix", action="store_true", help="for this environment of Python")
    place.add_argument("--prefix", metavar="DIR", help="in DIR/share/jupyter/kernels")
    return parser


def wrapped(spec: dict[str, Any], ram: str, swap: list[str], display_name: str) -> dict[str, Any]:
    """A kernel.json that runs the one of `spec` under a budget."""
    argv = list(spec["argv"])
    # Jupyter puts its own Python for these names, at the beginning alone.
    if _PYTHON.fullmatch(argv[0]):
        argv[0] = sys.executable
    words = [str(binary()), "run", "--quiet", "--ram", ram]
    words += [word for area in swap for word in ("--swap", area)]
    return {**spec, "argv": [*words, "--", *argv], "display_name": display_name}


def _is_wrapped(place: Path) -> bool:
    """Whether the kernel in a directory is one that swaptide runs."""
    try:
        program, command = json.loads((place / "kernel.json").read_text())["argv"][:2]
        return Path(program).name == "swaptide" and bool(command == "run")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_name(name: str, known: dict[str, str], prefix: str | None) -> None:
    """Refuses the name of a kernel that is none of swaptide's, here or in `prefix`."""
    name = name.lower()  # as Jupyter does
    places = [Path(known[name])] if name in known else []
    if prefix is not None:
        # Jupyter may not look there.
        places.append(Path(prefix) / "share" / "jupyter" / "kernels" / name)
    for place in places:
        if place.is_dir() and not _is_wrapped(place):
            raise SwaptideError(
                f"--name: {name}: there is such a kernel, and it is none of swaptide's ({place}); "
                "choose another name, or add --force to replace it"
            )


def _install(given: argparse.Namespace) -> str:
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        raise SwaptideError(
            "Jupyter is not installed for this Python; pip install jupyter-client ipykernel"
        ) from None
    manager = KernelSpecManager()
    try:
        spec = manager.get_kernel_spec(given.kernel)
    except NoSuchKernel:
        raise SwaptideError(
            f"--kernel: there is no {given.kernel!r}; see jupyter kernelspec list"
        ) from None
    name = given.name or f"swaptide-{given.kernel}"
    prefix = sys.prefix if given.sys_prefix else given.prefix
    if not given.force:
        _check_name(name, manager.find_kernel_specs(), prefix)
    # Size and areas are right, and swaptide works here: one line says it otherwise.
    areas = [word for area in given.swap for word in ("--swap", area)]
    ask("run", "--quiet", "--ram", given.ram, *areas, "--", sys.executable, "-S", "-c", "")
    display = given.display_name or f"{spec.display_name} (swaptide {given.ram})"
    with tempfile.TemporaryDirectory(prefix="swaptide-") as directory:
        for path in Path(spec.resource_dir).glob("*"):
            if path.is_file() and path.name != "kernel.json":
                (Path(directory) / path.name).write_bytes(path.read_bytes())
        kernel = wrapped(spec.to_dict(), given.ram, given.swap, display)
        text = json.dumps(kernel, indent=1) + "\n"
        (Path(directory) / "kernel.json").write_text(text)
        try:
            place = manager.install_kernel_spec(directory, name, user=prefix is None, prefix=prefix)
        except (OSError, ValueError) as error:
            raise SwaptideError(f"--name: {name}: cannot be installed: {error}") from None
    return f"installed {name}: {place}"


def main(words: list[str]) -> int:
    """The exit status; 2 for bad input, and nothing is changed then."""
    given = _parser().parse_args(words)
    try:
        print(_install(given))
    except SwaptideError as error:
        print(f"swaptide kernelspec: {error}", file=sys.stderr)
        return _BAD_INPUT
    return 0
