"""Filters of system calls that programs really set, from lists in filters/, as code for the kernel.

A list has `allow`, the names of calls that pass; `otherwise`, what happens to those that are not
named; and `rules` for the rest. A rule names its `calls` and what happens to them (`then`, allow by
default), if it has an `argument` (its number) only where that is one of `values`, or has no bits
but those of `only`, after `mask` was applied, or `bits` were taken; else what `else` says. Both may
be rules again. What happens: allow, kill, kill-thread, trap, or the name of an error number.
A value "pid" stands for the process that sets the filter. Numbers of calls come from the C
compiler's headers; names that these do not have are of other machines or of newer kernels.
"""

import errno
import json
import struct
from pathlib import Path

from confine import ARCH_X86_64, EQUAL, LOAD, RETURN, numbers

LISTS = Path(__file__).resolve().parent / "filters"
ACTIONS = {"allow": 0x7FFF0000, "kill": 0x80000000, "kill-thread": 0, "trap": 0x00030000}
ERRNO, AND = 0x00050000, 0x54
PID = 0x70696421
"""What filterlists.c replaces by its own process id."""
ALL = (1 << 64) - 1


def test(argument, mask, value, block):
    """The block, if an argument has this value under the mask."""
    code = list(block)
    for half in (1, 0):
        masked, wanted = mask >> 32 * half & 0xFFFFFFFF, value >> 32 * half & 0xFFFFFFFF
        if masked:
            at = 16 + 8 * argument + 4 * half
            code = [(LOAD, 0, 0, at), (AND, 0, 0, masked), (EQUAL, 0, len(code), wanted), *code]
    return code


def block(what, otherwise):
    """Code that ends with what happens."""
    if isinstance(what, str):
        action = ACTIONS[what] if what in ACTIONS else ERRNO | getattr(errno, what)
        return [(RETURN, 0, 0, action)]
    then = block(what.get("then", "allow"), otherwise)
    if "argument" not in what:
        return then
    mask = what.get("mask", (1 << what.get("bits", 64)) - 1)
    values = [PID if value == "pid" else value for value in what.get("values", [])]
    code = [line for value in values for line in test(what["argument"], mask, value, then)]
    if "only" in what:
        code += test(what["argument"], mask & ~what["only"], 0, then)
    return code + block(what.get("else", otherwise), otherwise)


def program(name, otherwise=None):
    """The filter of a list, as an array of struct sock_filter."""
    given = json.loads((LISTS / f"{name}.json").read_text())
    otherwise = otherwise or given["otherwise"]
    known = numbers()
    code = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCH_X86_64),
        (RETURN, 0, 0, ACTIONS["kill"]),
        (LOAD, 0, 0, 0),
    ]
    for rule in [{"calls": given["allow"]}, *given.get("rules", [])]:
        inner = block(rule, otherwise)
        for number in sorted(known[call] for call in rule["calls"] if call in known):
            code += [(EQUAL, 0, len(inner), number), *inner]
    code += block(otherwise, otherwise)
    return b"".join(struct.pack("=HBBI", *line) for line in code)
