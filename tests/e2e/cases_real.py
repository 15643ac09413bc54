"""Real programs at a fraction of their memory, their output compared with a run without swaptide."""

import hashlib
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from harness import HERE, Failure
from legacy import Case
from redis_client import Redis


def python(script, *arguments, options=()):
    def run(context):
        context.compare(
            [context.python, HERE / "py" / script, *arguments, context.seed],
            env=STEADY,
            options=options,
        )

    return run


# Python hashes strings differently in every process unless told not to.
STEADY = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "1", "LC_ALL": "C"}


def sort(megabytes, memory):
    """GNU sort with two threads on a file larger than the budget."""

    def run(context):
        source = context.directory / "lines"
        draw = random.Random(context.seed)
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
            context.directory,
            "-o",
            "sorted",
            source,
        ]
        context.compare(command, files=["sorted"], env=STEADY)

    return run


def sqlite(rows):
    """The sqlite3 command with a database in memory that it fills, indexes and joins itself."""

    def run(context):
        script = context.directory / "script.sql"
        script.write_text(f"""
            pragma temp_store = memory;
            create table buyer (id integer primary key, name text, town integer);
            create table sale (id integer primary key, buyer integer, price integer, note text);
            with recursive n(i) as (select 0 union all select i + 1 from n where i < {rows // 10 - 1})
              insert into buyer select i, printf('name-%016x', (i + {context.seed}) * 2654435761 % 4294967291), i * 7919 % 211
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
        context.compare(["sqlite3", ":memory:"], stdin=script)

    return run


def redis_value(number, turn):
    """A value of 100 to 1900 bytes that follows from its key: a part that compresses and a part
    that does not.
    """
    seed = hashlib.sha256(b"%d/%d" % (number, turn)).digest()
    size = 100 + int.from_bytes(seed[:2], "big") % 1800
    return (seed * 8 + b"value %d of turn %d; " % (number, turn) * 90)[:size]


def redis(keys):
    """A server is filled, read back, saved in the background while it is written to, and the dump
    read by a second server.
    """

    def batches():
        for first in range(0, keys, 500):
            yield range(first, min(first + 500, keys))

    def compare(context, server, turn_of, what):
        for batch in batches():
            for number, found in zip(
                batch, server.many([["GET", f"key:{number}"] for number in batch])
            ):
                expected = redis_value(number, turn_of(number))
                context.expect(
                    found == expected,
                    f"{what}: key {number} is {found!r:.80}, expected {expected!r:.80}",
                )

    def serve(context, name, directory, native):
        path = context.directory / name
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
        program = context.start(command, native=native)
        return program, Redis(path, lambda: program.process.poll() is None, context.remaining())

    def run(context):
        where = context.directory / "data"
        where.mkdir()
        program, server = serve(context, "first", where, False)
        for batch in batches():
            answers = server.many(
                [["SET", f"key:{number}", redis_value(number, 0)] for number in batch]
            )
            context.expect(
                all(answer == b"OK" for answer in answers), f"SET answered {answers[0]!r}"
            )
        context.expect(
            server.one("DBSIZE") == keys, "DBSIZE is not the number of keys that were set"
        )
        compare(context, server, lambda number: 0, "read back")
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
            context.expect(context.hung is None, "")
            time.sleep(0.05)
        state = server.info("persistence")["rdb_last_bgsave_status"]
        context.expect(
            state == "ok",
            f"BGSAVE ended with {state}: {(program.directory / 'stdout').read_text()[-400:]}",
        )
        compare(context, server, lambda number: int(number % 3 == 0), "after BGSAVE")
        server.shutdown()
        program.finish()
        second, copy = serve(context, "second", where, True)
        context.expect(
            copy.one("DBSIZE") == keys,
            f"the dump holds {copy.one('DBSIZE')} keys instead of {keys}",
        )
        compare(context, copy, lambda number: 0, "loaded from the dump")
        copy.shutdown()
        second.finish()

    return run


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


def gcc(files, functions):
    """Two compilers at a time under one shell, each a tree of processes; the object files must be
    the same.
    """

    def run(context):
        names = [f"part{number}" for number in range(files)]
        for number, name in enumerate(names):
            (context.directory / f"{name}.c").write_text(c_source(number, functions, context.seed))
        script = (
            "".join(
                f"gcc -O2 -c -o {name}.o {context.directory}/{name}.c & {'wait; ' if i % 2 else ''}"
                for i, name in enumerate(names)
            )
            + "wait"
        )
        context.compare(["sh", "-c", script], files=[f"{name}.o" for name in names])

    return run


def java(collector, entries):
    def run(context):
        options = ["-Xmx512m", f"-XX:+Use{collector}GC", "-XX:-UsePerfData"]
        context.compare(["java", *options, HERE / "java" / "Main.java", entries, context.seed])

    return run


def node(nodes):
    def run(context):
        context.compare(
            ["node", "--max-old-space-size=1024", HERE / "js" / "graph.js", nodes, context.seed]
        )

    return run


def stress(seconds, megabytes):
    """stress-ng writes patterns by all of its methods and verifies them itself."""

    def run(context):
        done = context.run(
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
                context.directory,
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
        context.expect("successful run completed" in said, f"stress-ng said {said[-300:]!r}")

    return run


QUERIES = (
    "create table t as select g as id, md5(g::text) as v, g % 1000 as k from generate_series(1, "
    "{rows}) g",
    "create index on t(k)",
    "select count(*), sum(hashtext(v)), sum(k) from t",
    "update t set k = k + 1 where id % 50 = 0",
    "select count(*) from t a join t b on a.id = b.id where a.k = 5",
    "select count(*), sum(hashtext(v)), sum(k) from t",
)


def postgres(rows, buffers):
    """A PostgreSQL whose shared buffers are larger than the budget answers as one that has the
    memory. It refuses to run as root.
    """

    def run(context):
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not found:
            raise Failure("PostgreSQL is not installed (Debian package postgresql)")
        drop = (
            ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            if os.getuid() == 0
            else []
        )
        answers = []
        for native in (True, False):
            home = context.directory / f"data-{native}"
            home.mkdir()
            for path in (home, *home.parents):
                if path == Path(tempfile.gettempdir()):
                    break
                path.chmod(0o755)
            if drop:
                shutil.chown(home, "postgres")
            subprocess.run(
                [*drop, found[-1] / "initdb", "-D", home / "db", "-A", "trust"],
                check=True,
                capture_output=True,
                cwd=home,
            )
            settings = {
                "shared_buffers": f"{buffers}MB",
                "unix_socket_directories": home,
                "listen_addresses": "",
                "huge_pages": "off",
            }
            words = [
                *drop,
                found[-1] / "postgres",
                "-D",
                home / "db",
                *[w for k, v in settings.items() for w in ("-c", f"{k}={v}")],
            ]
            server = context.start(words, native=native, options=["--shared"])
            ask = [*drop, "psql", "-h", home, "-d", "postgres", "-Atc"]
            while (
                context.hung is None
                and subprocess.run([*ask, "select 1"], capture_output=True, cwd=home).returncode
            ):
                time.sleep(0.2)
            asked = [
                subprocess.run(
                    [*ask, query.format(rows=rows)], capture_output=True, text=True, cwd=home
                )
                for query in QUERIES
            ]
            answers.append([(done.returncode, done.stdout, done.stderr) for done in asked])
            subprocess.run(
                [*drop, found[-1] / "pg_ctl", "-D", home / "db", "stop", "-m", "fast"],
                capture_output=True,
                cwd=home,
            )
            server.finish()
        context.expect(answers[0] == answers[1], f"it answers {answers[1]} instead of {answers[0]}")
        context.expect(all(code == 0 for code, _, _ in answers[0]), f"it failed: {answers[0]}")

    return run


CASES = [
    Case("python-structures", python("structures.py", 60), 64, limit=180, allowance=4),
    Case("python-walk", python("walk.py", 256), 64, limit=180, allowance=4),
    Case(
        "python-shared",
        python("shared.py", 192, options=["--shared"]),
        96,
        limit=180,
        allowance=32,
        forks=True,
    ),
    # Five interpreters that share most of what they have since a fork: a process that counted all
    # of it as its own would not come to its turn.
    Case(
        "python-shared-tight",
        python("shared.py", 96, options=["--shared"]),
        44,
        limit=60,
        allowance=40,
        forks=True,
    ),
    Case("sort", sort(64, 96), 32, limit=180, needs=("sort",), allowance=4),
    Case("sqlite-module", python("sql.py", 250000), 20, limit=180, allowance=4),
    Case("sqlite-command", sqlite(300000), 20, limit=180, needs=("sqlite3",), allowance=4),
    Case("redis", redis(60000), 32, limit=180, needs=("redis-server",), allowance=8, forks=True),
    Case("gcc", gcc(2, 50), 64, limit=180, needs=("gcc",), allowance=8, forks=True),
    Case("java-g1", java("G1", 220000), 96, limit=180, needs=("java",), allowance=48),
    Case("java-serial", java("Serial", 220000), 96, limit=180, needs=("java",), allowance=48),
    Case("node", node(250000), 96, limit=180, needs=("node",), allowance=48),
    Case("stress-ng", stress(10, 128), 32, limit=90, needs=("stress-ng",), allowance=8, forks=True),
    # The sizes of the promise: each at a quarter of its memory or less.
    Case("full-python", python("structures.py", 300), 256, full=True, limit=900, allowance=4),
    Case("full-walk", python("walk.py", 1024), 256, full=True, limit=900, allowance=4),
    Case("full-sort", sort(144, 96), 24, full=True, limit=1200, needs=("sort",), allowance=4),
    Case("full-sqlite", sqlite(300000), 19, full=True, limit=1200, needs=("sqlite3",), allowance=4),
    Case(
        "full-redis",
        redis(500000),
        160,
        full=True,
        limit=900,
        needs=("redis-server",),
        allowance=16,
        forks=True,
    ),
    Case(
        "full-postgres",
        postgres(600000, 192),
        96,
        full=True,
        limit=900,
        needs=("psql",),
        allowance=48,
        forks=True,
    ),
    Case(
        "full-gcc", gcc(4, 300), 128, full=True, limit=900, needs=("gcc",), allowance=8, forks=True
    ),
    Case("full-java", java("G1", 900000), 128, full=True, limit=900, needs=("java",), allowance=64),
    Case("full-node", node(500000), 128, full=True, limit=1200, needs=("node",), allowance=16),
    Case(
        "full-stress-ng",
        stress(600, 512),
        128,
        full=True,
        limit=900,
        needs=("stress-ng",),
        allowance=8,
        forks=True,
    ),
]
