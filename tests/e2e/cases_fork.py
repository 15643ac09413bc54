"""Forks and what can hang around them: locks of other libraries' fork handlers, allocators,
filters, limits, and signals that shall end a run.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from cases_real import redis_value
from cases_trust import PROFILE
from harness import HERE, Failure
from legacy import Case, Skip
from processes import descendants
from redis_client import Redis

ALLOCATORS = {
    "jemalloc": "libjemalloc.so.2",
    "mimalloc": "libmimalloc.so.2.0",
    "tcmalloc": "libtcmalloc.so.4",
}


def library(name):
    """The path of an allocator's library as Debian packages it."""
    found = [path for path in Path("/usr/lib").glob(f"*/{ALLOCATORS[name]}")]
    if not found:
        raise Skip(f"{ALLOCATORS[name]} is not installed")
    return found[0]


def agent_log(context):
    path = context.directory / "agent.log"
    return path.read_text() if path.exists() else ""


def logged(context, **more):
    """An environment in which the agent writes its log, whoever runs the program."""
    log = context.directory / "agent.log"
    log.touch()
    log.chmod(0o666)
    return {**os.environ, "SWAPTIDE_AGENT_LOG": str(log), **more}


def lock(mode, seconds=3, megabytes=64, managed=True):
    """One mode of forklock.c. `managed`: every child must have been."""

    def run(context):
        length = 60 if context.case.full else seconds
        context.c("forklock", mode, megabytes=megabytes, seconds=length, env=logged(context))
        lost = [line for line in agent_log(context).splitlines() if "bus error" in line]
        context.expect(not lost, f"pages were lost: {lost[:3]}")
        unmanaged = [line for line in agent_log(context).splitlines() if "is not managed" in line]
        context.expect(not (managed and unmanaged), f"children were not managed: {unmanaged[:3]}")

    return run


def few_descriptors(context):
    """The limit on open files is below what the engine has open: the fork's event could not be
    read, so the process is let go before it.
    """
    context.c("forklock", "files", megabytes=64, seconds=1, env=logged(context))
    context.expect(
        context.native or "the process is let go" in agent_log(context),
        f"it was not: {agent_log(context)[-300:]!r}",
    )


def full_table(context):
    """No descriptor is free in the program's table: the child is given all its memory."""
    context.c("forklock", "full", megabytes=64, seconds=1, env=logged(context))
    context.expect(
        context.native or "there is no way to a forked child" in agent_log(context),
        f"there was: {agent_log(context)[-300:]!r}",
    )


def hand_over_fails(context):
    """A child that is silent for long is given its memory, and its parent goes on; one that has its
    userfaultfd and never takes over is killed, and said to be.
    """
    if context.native:
        return
    expected = {7: ("child 0", ""), 8: ("child 9", "was killed")}
    started = {}
    for kind in expected:
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--quiet",
            "--",
            context.binary("forklock"),
            48,
            1,
            context.seed,
            "once",
        ]
        started[kind] = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**logged(context), "SWAPTIDE_TEST_FAIL": str(kind)},
        )
    for kind, (said, complaint) in expected.items():
        out, errors = started[kind].communicate()
        result = f"kind {kind}: status {started[kind].returncode}, {out!r}, {errors!r}"
        context.expect(
            started[kind].returncode == 0 and said in out and "OK forklock once" in out, result
        )
        context.expect(complaint in errors, result)
    context.expect("does not say that it is there" in agent_log(context), agent_log(context)[-400:])


def birth_fails(context):
    """A child of a followed fork that never arms its memory is killed, and said to be; its parent
    goes on.
    """
    done = context.c(
        "forklock", "once", megabytes=48, seconds=1, env={**os.environ, "SWAPTIDE_TEST_FAIL": "13"}
    )
    context.expect(
        context.native or "child 9" in done.text(), f"the child was not killed: {done.text()!r}"
    )


def wait_for(context, true, what):
    while not true():
        if context.hung is not None:
            raise Failure(f"never seen: {what}")
        time.sleep(0.05)


def stands_inside(root):
    """A process below `root` has a thread of its own that has all signals blocked, or waits for an
    event's reader.
    """
    for pid in descendants(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if "\nSigBlk:\tfffffffffffbfeff\n" in status and status.startswith("Name:\tforklock"):
            return True
    return False


def told_to_end(context):
    """SIGTERM to the run ends it in every stage of a fork at which the handler stands still for
    good. A program that ignores the signal lives.
    """
    if context.native:
        return
    stages = [(kind, mode) for kind in (10, 11, 12) for mode in ("once", "handles")]
    programs = {}
    for kind, mode in stages if context.case.full else [(10, "once"), (12, "handles")]:
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--quiet",
            "--",
            context.binary("forklock"),
            48,
            1,
            context.seed,
            mode,
        ]
        programs[kind, mode] = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SWAPTIDE_TEST_FAIL": str(kind)},
        )
    script = "import signal,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); x = bytearray(40<<20); print('ready', flush=True); time.sleep(9); print('lives')"
    words = [context.swaptide, "run", "--ram", "32M", "--quiet", "--", context.python, "-c", script]
    ignores = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    context.expect(ignores.stdout.readline() == "ready\n", "it did not begin")
    ignores.send_signal(signal.SIGTERM)
    for stage, program in programs.items():
        wait_for(context, lambda: stands_inside(program.pid), f"{stage} inside of swaptide")
        time.sleep(0.3)
        program.send_signal(signal.SIGTERM)
    for (kind, mode), program in programs.items():
        out, errors = program.communicate()
        result = f"stage {kind}, {mode}: status {program.returncode}, {out!r}, {errors!r}"
        # Its default action ends the process as soon as the agent looks; what handles the signal is
        # killed, and it is said.
        killed = program.returncode == 137 and "its threads wait inside swaptide; killed" in errors
        ended = program.returncode == 143 and mode == "once"
        context.expect(killed or ended, result)
    out, _ = ignores.communicate()
    context.expect(
        ignores.returncode == 0 and out == "lives\n",
        f"who ignores the signal: {ignores.returncode}, {out!r}",
    )


THIEF = r"""
import os, re, select, socket, struct, sys, time
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
tried = 0
while not select.select([0], [], [], 0)[0]:
    time.sleep(0.001)
    for name in set(re.findall(r"@(swaptide-(?:fork|end)\S+)", open("/proc/net/unix").read())):
        thief = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thief.settimeout(0.5)
        try:
            thief.connect("\0" + name)
            tried += 1
            token = int(name.rsplit("-", 1)[1], 16) & (1 << 64) - 1
            thief.send(struct.pack("=IIQ", 7, os.getpid(), token))
            data, fds, *_ = socket.recv_fds(thief, 64, 24)
            if fds or data:
                print("STOLEN", [os.readlink(f"/proc/self/fd/{fd}") for fd in fds], data, flush=True)
                sys.exit(1)
        except OSError:
            pass
        thief.close()
print("tried", tried)
"""


def door(context):
    """Where pidfd_getfd is not permitted, as in containers, forks go on and their children are
    managed; and another user who knocks at every socket that is to be seen is given nothing."""
    if context.native:
        return
    thief = subprocess.Popen(
        [context.python, "-c", THIEF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    report = context.directory / "report.json"
    confine = [context.python, HERE / "confine.py", PROFILE, "--without", "pidfd_getfd"]
    for words, last in (
        ([context.binary("forks"), 96, 3, context.seed, "tree"], "OK forks tree"),
        ([context.binary("forklock"), 64, 3, context.seed, "maps"], "OK forklock maps"),
    ):
        command = [
            *confine,
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--quiet",
            "--report",
            report,
            "--",
            *words,
        ]
        ended = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=logged(context),
        )
        context.expect(
            ended.returncode == 0 and last in ended.stdout,
            f"{words}: {ended.returncode}: {ended.stdout[-200:]!r} {ended.stderr[-400:]!r}",
        )
    said = thief.communicate()[0]
    context.expect("STOLEN" not in said and said.startswith("tried"), f"the other user: {said!r}")
    unmanaged = [line for line in agent_log(context).splitlines() if "is not managed" in line]
    context.expect(not unmanaged, f"children were not managed: {unmanaged[:3]}")


def allocators(*names):
    """Four threads allocate, one forks, under each allocator: every block and every page has what
    was written to it.
    """

    def run(context):
        for name in names:
            preloaded = f"LD_PRELOAD={library(name)}"
            words = [
                context.binary("forklock"),
                64,
                30 if context.case.full else 3,
                context.seed,
                "allocators",
            ]
            context.compare(["env", preloaded, *words])

    return run


R20 = r"""
my %h; for my $i (0..60000){ $h{"k$i"}=[$i,"v" x ($i%60)]; }
my $s=0; for my $r (0..1){ for my $i (0..60000){ my $v=$h{"k$i"}; $s=($s*31+$v->[0]+length $v->[1])%1000000007; } }
print "$s\n"; my @a=sort { $a <=> $b } map { ($_*7919)%1000003 } 0..100000; print "$a[1234]\n"; $|=1;
my $p=fork; if(!$p){ my $t=0; $t+=length $_->[1] for values %h; print "child $t\n"; exit 7 }
waitpid $p,0; print $?>>8,"\n"; print `echo sub`; my $big="ab" x (6<<20); $big=~s/ab/c/g; print length $big,"\n";
"""


def perl(times):
    """A program that forks under an allocator whose own fork handlers change mappings before the
    child has said that it is there.
    """

    def run(context):
        for _ in range(times):
            context.compare(["env", f"LD_PRELOAD={library('jemalloc')}", "perl", "-e", R20])

    return run


RUBY = r"""
seed = 12345
rand = -> { seed = (seed * 1103515245 + 12345) & 0x7fffffff }
table = {}
60000.times { |i| table["k#{i}"] = "v" * (i % 200) }
sum = -> { table.sum { |k, v| k.size * 31 + v.size } }
threads = 4.times.map { |n| Thread.new { 200.times.map { |i| ("x" * ((n + 1) * 1000 + i)).size }.sum } }
children = (1..ARGV[0].to_i).map do |n|
  pid = fork { s = sum.call; made = 3000.times.map { |i| "c" * (i % 500) }; exit!((s + made.sum(&:size)) % 200 == (sum.call + made.sum(&:size)) % 200 ? 0 : 1) }
  1000.times { table["k#{rand.call % 60000}"] = "w" * (rand.call % 300) }
  Process.wait2(pid)[1].exitstatus
end
puts children.inspect, threads.map(&:value).inspect, sum.call
"""


def ruby(forks):
    """Ruby with threads and forks under jemalloc."""

    def run(context):
        context.compare(["env", f"LD_PRELOAD={library('jemalloc')}", "ruby", "-e", RUBY, forks])

    return run


def redis_saves(keys, turns):
    """redis-server as packaged (with jemalloc) saves in the background while it is written to,
    again and again; what it has and what it saved is right.
    """

    def run(context):
        directory = context.directory / "redis"
        directory.mkdir()
        turn_of = dict.fromkeys(range(keys), 0)

        def serve(name):
            path = context.directory / name
            program = context.start(
                [
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
            )
            return program, Redis(path, lambda: program.process.poll() is None, context.remaining())

        def write(server, numbers, turn):
            for first in range(0, len(numbers), 500):
                server.many(
                    [
                        ["SET", f"key:{number}", redis_value(number, turn)]
                        for number in numbers[first : first + 500]
                    ]
                )
            turn_of.update(dict.fromkeys(numbers, turn))

        def check(server, what):
            for first in range(0, keys, 500):
                batch = range(first, min(first + 500, keys))
                for number, found in zip(
                    batch, server.many([["GET", f"key:{number}"] for number in batch])
                ):
                    context.expect(
                        found == redis_value(number, turn_of[number]),
                        f"{what}: key {number} is {found!r:.80}",
                    )

        program, server = serve("first")
        write(server, range(keys), 0)
        for turn in range(1, turns + 1):
            server.one("BGSAVE")
            write(server, range(turn % 7, keys, 7), turn)
            while server.info("persistence")["rdb_bgsave_in_progress"] != "0":
                context.expect(context.hung is None, "")
                time.sleep(0.05)
            state = server.info("persistence")["rdb_last_bgsave_status"]
            context.expect(
                state == "ok",
                f"BGSAVE {turn} ended with {state}: "
                f"{(program.directory / 'stdout').read_text()[-400:]}",
            )
        check(server, "after all saves")
        server.one("SAVE")
        server.shutdown()
        program.finish()
        second, copy = serve("second")
        check(copy, "loaded from the dump")
        copy.shutdown()
        second.finish()

    return run


CASES = [
    Case("fork-locks-maps", lock("maps"), 24, allowance=48, forks=True),
    Case("fork-locks-moves", lock("moves"), 24, allowance=48, forks=True),
    Case("fork-locks-excludes", lock("excludes"), 24, allowance=48, forks=True),
    Case("fork-locks-spins", lock("spins", managed=False), 24, allowance=160, forks=True),
    Case("fork-locks-naps", lock("naps", managed=False), 24, allowance=160, forks=True),
    Case("fork-changes", lock("changes"), 24, allowance=48, forks=True),
    Case("fork-files", few_descriptors, 24, allowance=160, forks=True),
    Case("fork-full-table", full_table, 24, allowance=160, forks=True),
    Case("fork-fails", hand_over_fails, 24, swaps=False),
    # Followed forks, with threads that fault on what is out while the copy is made.
    *[
        Case(
            f"fork-followed-{mode}",
            lock(mode, managed=False),
            24,
            allowance=200,
            forks=True,
            unprivileged=True,
        )
        for mode in ("spins", "long")
    ],
    Case(
        "fork-birth",
        birth_fails,
        24,
        forks=True,
        unprivileged=True,
        complaint="does not arm its memory",
    ),
    Case("fork-told-to-end", told_to_end, 24, swaps=False),
    Case("fork-door", door, 32, swaps=False),
    Case("fork-jemalloc", allocators("jemalloc"), 24, allowance=200, forks=True),
    Case("fork-perl", perl(1), 40, allowance=60, forks=True, needs=("perl",)),
    Case(
        "full-fork-ruby",
        ruby(20),
        24,
        full=True,
        limit=600,
        allowance=100,
        forks=True,
        needs=("ruby",),
    ),
    Case(
        "full-fork-allocators",
        allocators(*ALLOCATORS),
        24,
        full=True,
        limit=600,
        allowance=200,
        forks=True,
    ),
    Case("full-fork-told-to-end", told_to_end, 24, full=True, swaps=False),
    Case(
        "full-fork-perl",
        perl(30),
        40,
        full=True,
        limit=1200,
        allowance=60,
        forks=True,
        needs=("perl",),
    ),
    Case(
        "full-fork-redis",
        redis_saves(60000, 12),
        32,
        full=True,
        limit=900,
        allowance=60,
        forks=True,
        needs=("redis-server",),
    ),
    *[
        Case(
            f"full-fork-locks-{mode}",
            lock(mode, managed=mode not in ("spins", "naps")),
            24,
            full=True,
            limit=300,
            allowance=200,
            forks=True,
        )
        for mode in ("maps", "moves", "excludes", "spins", "naps", "changes")
    ],
]
