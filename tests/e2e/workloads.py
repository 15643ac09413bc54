"""Real programs, whose output is compared with that of a run without swaptide."""

import hashlib
import random
import re
import time

from harness import HERE, Failure
from redis_client import Redis

# Python hashes strings differently in every process unless told not to.
STEADY = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "1", "LC_ALL": "C"}


def python(case, script, *arguments, options=()):
    case.compare(
        [case.python, HERE / "py" / script, *arguments, case.seed],
        env=STEADY,
        options=options,
    )


def sort(case, megabytes, memory):
    """GNU sort with two threads on a file larger than the budget."""
    source = case.directory / "lines"
    draw = random.Random(case.seed)
    with open(source, "wb") as file:
        for _ in range(megabytes):
            raw = draw.randbytes(1 << 18).hex()
            file.write(
                "".join(
                    f"{raw[i : i + 14]} line {raw[i : i + 3]} of a file\n"
                    for i in range(0, len(raw), 16)
                ).encode()
            )
    command = [
        "sort",
        "--parallel=2",
        "-S",
        f"{memory}M",
        "-T",
        case.directory,
        "-o",
        "sorted",
        source,
    ]
    case.compare(command, files=["sorted"], env=STEADY)


def sqlite(case, rows):
    """The sqlite3 command with a database in memory that it fills, indexes and joins itself."""
    script = case.directory / "script.sql"
    script.write_text(f"""
        pragma temp_store = memory;
        create table buyer (id integer primary key, name text, town integer);
        create table sale (id integer primary key, buyer integer, price integer, note text);
        with recursive n(i) as (select 0 union all select i + 1 from n where i < {rows // 10 - 1})
          insert into buyer
          select i, printf('name-%016x', (i + {case.seed}) * 2654435761 % 4294967291),
                 i * 7919 % 211
          from n;
        with recursive n(i) as (select 0 union all select i + 1 from n where i < {rows - 1})
          insert into sale select i, i * 48271 % {rows // 10}, i * 16807 % 9973,
                                  printf('note %d %080d', i, i * 69621 % 2147483647) from n;
        create index sale_buyer on sale (buyer);
        select town, count(*), sum(price), min(note) from buyer join sale on buyer.id = sale.buyer
          group by town order by 3, 1;
        update sale set price = price + 1 where id % 5 = 0;
        select count(*), sum(price), sum(length(note)) from sale;
        pragma integrity_check;
    """)
    case.compare(["sqlite3", ":memory:"], stdin=script)


def redis_value(number, turn):
    """A value of 100 to 1900 bytes that follows from its key: a part that compresses and a part
    that does not.
    """
    seed = hashlib.sha256(b"%d/%d" % (number, turn)).digest()
    size = 100 + int.from_bytes(seed[:2], "big") % 1800
    return (seed * 8 + b"value %d of turn %d; " % (number, turn) * 90)[:size]


def redis(case, keys):
    """A server is filled, read back, saved in the background while it is written to, and the dump
    read by a second server.
    """

    def batches():
        for first in range(0, keys, 500):
            yield range(first, min(first + 500, keys))

    def compare(case, server, turn_of, what):
        for batch in batches():
            for number, found in zip(
                batch, server.many([["GET", f"key:{number}"] for number in batch])
            ):
                expected = redis_value(number, turn_of(number))
                assert found == expected, (
                    f"{what}: key {number} is {found!r:.80}, expected {expected!r:.80}"
                )

    def serve(case, name, directory, native):
        path = case.directory / name
        command = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            path,
            "--dir",
            directory,
            "--save",
            "",
            "--appendonly",
            "no",
            "--daemonize",
            "no",
        ]
        program = case.start(command, native=native)
        return program, Redis(path, lambda: program.process.poll() is None, case.remaining())

    where = case.directory / "data"
    where.mkdir()
    program, server = serve(case, "first", where, False)
    for batch in batches():
        answers = server.many(
            [["SET", f"key:{number}", redis_value(number, 0)] for number in batch]
        )
        assert all(answer == b"OK" for answer in answers), f"SET answered {answers[0]!r}"
    assert server.one("DBSIZE") == keys, "DBSIZE is not the number of keys that were set"
    compare(case, server, lambda number: 0, "read back")
    server.one("BGSAVE")
    # Every third key is changed while the child writes the old values out.
    for batch in batches():
        server.many(
            [
                ["SET", f"key:{number}", redis_value(number, 1)]
                for number in batch
                if number % 3 == 0
            ]
        )
    while server.info("persistence")["rdb_bgsave_in_progress"] != "0":
        assert case.hung is None
        time.sleep(0.05)
    state = server.info("persistence")["rdb_last_bgsave_status"]
    assert state == "ok", (
        f"BGSAVE ended with {state}: {(program.directory / 'stdout').read_text()[-400:]}"
    )
    compare(case, server, lambda number: int(number % 3 == 0), "after BGSAVE")
    server.shutdown()
    program.finish()
    second, copy = serve(case, "second", where, True)
    assert copy.one("DBSIZE") == keys, f"the dump holds {copy.one('DBSIZE')} keys instead of {keys}"
    compare(case, copy, lambda number: 0, "loaded from the dump")
    copy.shutdown()
    second.finish()


def c_source(number, functions, seed):
    """A C file that is dear to optimise: many functions with switches, loops and tables."""
    draw = random.Random(seed * 100 + number)
    parts = ["#include <stdint.h>\n#include <string.h>\n"]
    for index in range(functions):
        table = ", ".join(str(draw.randrange(1 << 30)) for _ in range(64))
        cases = "".join(
            f"        case {value}: s = s * {draw.randrange(3, 99)}u + t[(s >> "
            f"{draw.randrange(8)}) & 63] + x[i % 16]; "
            f"if (s & {1 << draw.randrange(20)}) s ^= "
            f"f{max(0, index - draw.randrange(1, 9))}_{number}(x, n / 2); break;\n"
            for value in range(24)
        )
        parts.append(
            f"static const uint32_t t{index}[64] = {{{table}}};\n"
            f"uint32_t f{index}_{number}(const uint32_t *x, uint32_t n) {{\n"
            f"    const uint32_t *t = t{index}; uint32_t s = n;\n"
            f"    for (uint32_t i = 0; i < n; i++) switch ((s + i) % 24) {{\n{cases}"
            f"    }}\n    return s;\n}}\n"
        )
    return "".join(parts)


def gcc(case, files, functions):
    """Two compilers at a time under one shell, each a tree of processes; the object files must be
    the same.
    """
    names = [f"part{number}" for number in range(files)]
    for number, name in enumerate(names):
        (case.directory / f"{name}.c").write_text(c_source(number, functions, case.seed))
    script = (
        "".join(
            f"gcc -O2 -c -o {name}.o {case.directory}/{name}.c & {'wait; ' if i % 2 else ''}"
            for i, name in enumerate(names)
        )
        + "wait"
    )
    case.compare(["sh", "-c", script], files=[f"{name}.o" for name in names])


def java(case, collector, entries):
    options = ["-Xmx512m", f"-XX:+Use{collector}GC", "-XX:-UsePerfData"]
    case.compare(["java", *options, HERE / "java" / "Main.java", entries, case.seed])


def node(case, nodes):
    case.compare(["node", "--max-old-space-size=1024", HERE / "js" / "graph.js", nodes, case.seed])


def stress(case, seconds, megabytes):
    """stress-ng writes patterns by all of its methods and verifies them itself."""
    done = case.run(
        [
            "stress-ng",
            "--vm",
            "2",
            "--vm-bytes",
            f"{megabytes}M",
            "--vm-method",
            "all",
            "--verify",
            "--timeout",
            f"{seconds}s",
            "--temp-path",
            case.directory,
        ]
    )
    said = done.text() + done.errors()
    wrong = [
        line
        for line in said.splitlines()
        if re.search(r"\bfail:|error|corrupt|oom", line, re.IGNORECASE)
    ]
    if wrong:
        raise Failure("; ".join(wrong[:4]))
    assert "successful run completed" in said, f"stress-ng said {said[-300:]!r}"
