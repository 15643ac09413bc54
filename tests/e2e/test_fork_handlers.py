"""Forks and what can hang at them: locks of other libraries' fork handlers, allocators, filters,
limits, and signals that shall end a run."""

import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from confine import PROFILE, run_confined
from ctl import wait_for_line
from harness import HERE, Failure, full, param
from processes import descendants
from redis_client import Redis
from workloads import redis_value

ALLOCATORS = {
    "jemalloc": "libjemalloc.so.2",
    "mimalloc": "libmimalloc.so.2.0",
    "tcmalloc": "libtcmalloc.so.4",
}


def missing(what):
    """Skips the case, but fails it where everything is to be installed."""
    why = f"{what} is not installed (./check --full installs it)"
    if os.environ.get("SWAPTIDE_TEST_ALL") == "1":
        raise Failure(why)
    pytest.skip(why)


def library(name):
    """The path of an allocator's library as Debian packages it."""
    found = list(Path("/usr/lib").glob(f"*/{ALLOCATORS[name]}"))
    if not found:
        missing(ALLOCATORS[name])
    return found[0]


# The objects of musl's allocator in its archive, some of them twice under one name.
MUSL_OBJECTS = [
    *("malloc", "free", "realloc", "calloc", "memalign", "posix_memalign", "aligned_alloc"),
    *("lite_malloc", "malloc_usable_size", "replaced", "__lock"),
]


def musl_allocator(case):
    """musl's allocator as a library for programs of glibc, linked from musl's own archive."""
    archive = next(iter(Path("/usr/lib").glob("*-linux-musl/libc.a")), None)
    if archive is None:
        missing("musl's libc.a")
    directory = case.directory / "musl"
    for number in ("1", "2"):
        place = directory / number
        place.mkdir(parents=True)
        # It names those that are not there twice, and ends well.
        words = ["ar", "xN", number, archive, *(f"{name}.lo" for name in MUSL_OBJECTS)]
        subprocess.run(words, cwd=place, check=True, capture_output=True)
    built = directory / "libmusl_allocator.so"
    source = HERE / "c" / "musl_allocator.c"
    words = ["cc", "-O2", "-fPIC", "-shared", "-o", built, source, *directory.glob("*/*.lo")]
    subprocess.run(words, check=True)
    return built


def agent_log(case):
    path = case.directory / "agent.log"
    return path.read_text() if path.exists() else ""


def logged(case, **more):
    """An environment in which the agent writes its log, as whichever user the program runs."""
    log = case.directory / "agent.log"
    log.touch()
    log.chmod(0o666)
    return {**os.environ, "SWAPTIDE_AGENT_LOG": str(log), **more}


def run_forklock(case, mode, seconds=3, managed=True):
    """One mode of forklock.c. `managed`: every child must have been."""
    case.run_c("forklock", mode, megabytes=64, seconds=seconds, env=logged(case))
    lost = [line for line in agent_log(case).splitlines() if "bus error" in line]
    assert not lost, f"pages were lost: {lost[:3]}"
    unmanaged = [line for line in agent_log(case).splitlines() if "is not managed" in line]
    # The thread that forks may get its lock from another thread while the handler helps one: then
    # that child has all its memory.
    most = 2 if case.name.startswith(("fork-locks-moves", "fork-locks-maps")) else 0
    assert not managed or len(unmanaged) <= most, f"children were not managed: {unmanaged[:3]}"


@pytest.mark.swaptide(budget=24, allowance=48, forks=True)
@pytest.mark.parametrize(
    "mode",
    [
        "maps",
        param("moves", allowance=144),
        full("excludes"),
        param("spins", allowance=160),
        full("naps", allowance=160),
    ],
)
def test_fork_locks(case, mode):
    run_forklock(case, mode, managed=mode not in ("spins", "naps"))


@pytest.mark.full
@pytest.mark.swaptide(budget=24, limit=300, allowance=200, forks=True)
@pytest.mark.parametrize("mode", ["maps", "moves", "excludes", "spins", "naps", "changes"])
def test_full_fork_locks(case, mode):
    run_forklock(case, mode, seconds=case.stretched(10), managed=mode not in ("spins", "naps"))


@pytest.mark.swaptide(budget=24, allowance=48, forks=True)
def test_fork_changes(case):
    run_forklock(case, "changes")


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=24, allowance=200, forks=True)
@pytest.mark.parametrize(
    "mode", ["spins", "long", full("advises"), full("lets"), full("lets-bare")]
)
def test_fork_followed(case, mode):
    """Followed forks, with threads that fault on what is out while the copy is made, or give advice
    for it and move it, or let children have it.
    """
    run_forklock(case, mode, managed=False)


@pytest.mark.full
@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=24, allowance=200, forks=True)
def test_fork_followed_wipes(case):
    """`MADV_WIPEONFORK` during a followed fork that takes 0.6 s waits for it."""
    run_forklock(case, "wipes", managed=False)


@pytest.mark.parametrize("mode", ["forks-locked", "filters-locked"])
@pytest.mark.parametrize("follows", [full(False, id="told"), param(True, id="followed")])
@pytest.mark.swaptide(budget=24, allowance=200, forks=True)
def test_fork_refuses(case, mode, follows):
    """A fork handler waits for a lock whose holder forks past libc, or sets a filter for all
    threads: both need the process detached. Neither hangs: without the right to fork events the
    holder's call fails, and is made when it is tried again.
    """
    more = {"SWAPTIDE_TEST_FOLLOWED_FORKS": "1"} if follows else {}
    case.run_c("forklock", mode, megabytes=64, seconds=1, env=logged(case, **more))
    said = "its call fails" in agent_log(case)
    is_refused = follows or mode == "filters-locked"
    assert case.native or said == is_refused, f"{said}: {agent_log(case)[-300:]!r}"


@pytest.mark.full
@pytest.mark.swaptide(budget=24, allowance=200, forks=True, native=False)
def test_fork_refuses_confined(case):
    """The same for a thread that has put itself under a filter meanwhile: there both wait, until
    the run is told to end.
    """
    program = case.start([case.binary("forklock"), 64, 1, case.seed, "forks-confined"])
    wait_for_line(case, program, "forks")
    time.sleep(3)
    assert program.process.poll() is None, "it does not wait: docs/semantics.md says so"
    program.process.terminate()
    began = time.monotonic()
    program.finish(status=None)
    assert time.monotonic() - began < 15


@pytest.mark.swaptide(budget=24, allowance=200, forks=True)
def test_fork_fails_alongside(case):
    """A fork past libc at the moment of a fork that fails: the child gets its memory, and the
    thread whose fork failed does not wait 15 s for a child that it has not.
    """
    case.run_c("forklock", "fails", megabytes=64, seconds=1, env=logged(case))
    said = agent_log(case).count("a fork failed while another bypassed libc")
    assert case.native or said == 3, f"{said}: {agent_log(case)[-300:]!r}"


@pytest.mark.unprivileged
@pytest.mark.full
@pytest.mark.swaptide(budget=24, allowance=200, forks=True, limit=120)
def test_fork_followed_stuck(case):
    """A fork handler spins for a lock whose holder waits until a moved mapping is known: it goes
    on, and the child is stopped rather than given what may be wrong.
    """
    case.run_c("forklock", "moves-spins", megabytes=64, seconds=3, env=logged(case))
    said = "stopped rather than given wrong data" in agent_log(case)
    assert case.native or said, f"no child was stopped: {agent_log(case)[-300:]!r}"


@pytest.mark.swaptide(budget=32, allowance=64, forks=True)
@pytest.mark.parametrize("mode", ["closed", full("fixed")])
def test_fork_ends(case, mode):
    """What a fork has open in the program's table is where no other thread writes to closed
    streams, or puts something of its own."""
    case.run_c("forkends", mode, megabytes=64)


@pytest.mark.full
@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=32, allowance=200, forks=True)
@pytest.mark.parametrize("mode", ["closed", "fixed"])
def test_fork_ends_followed(case, mode):
    case.run_c("forkends", mode, megabytes=64)


@pytest.mark.full
@pytest.mark.swaptide(budget=16, allowance=160, forks=True)
def test_fork_within(case):
    """A handler of a library forks: before the fork, after it, and in the child."""
    case.run_c("forkends", "within", megabytes=24, env=logged(case))
    assert "detach" not in agent_log(case), agent_log(case)[-300:]


@pytest.mark.swaptide(budget=32, swaps=False, forks=True)
def test_fork_within_unmanaged(case):
    case.run_c("forkends", "within-unmanaged", megabytes=1)


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=16, allowance=400, forks=True)
def test_fork_within_followed(case):
    """Where forks are followed the process is let go before the inner one."""
    case.run_c("forkends", "within", megabytes=24, env=logged(case))
    assert case.native or "a fork handler forks" in agent_log(case), agent_log(case)[-300:]


@pytest.mark.swaptide(budget=32, swaps=False, allowance=200, forks=True)
def test_fork_shared_early(case):
    """A process begins to share the memory before any of it is managed, and lives longer."""
    case.run_c("forkends", "shared-early", megabytes=96)


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=32, allowance=200, forks=True)
def test_fork_leaderless(case):
    """A fork by clone3 after the first thread has ended: its arguments are still read."""
    case.run_c("forkends", "leaderless", megabytes=64)


@pytest.mark.swaptide(budget=24, allowance=160, forks=True)
def test_fork_files(case):
    """The limit on open files is below what the engine has open: the fork's event could not be
    read, so the process is let go before it.
    """
    case.run_c("forklock", "files", megabytes=64, seconds=1, env=logged(case))
    assert case.native or "(ulimit -n): detaching" in agent_log(case), (
        f"it was not: {agent_log(case)[-300:]!r}"
    )


@pytest.mark.swaptide(budget=24, allowance=160, forks=True)
def test_fork_full_table(case):
    """No descriptor is free in the program's table: the child is given all its memory."""
    case.run_c("forklock", "full", megabytes=64, seconds=1, env=logged(case))
    assert case.native or "no channel to a forked child" in agent_log(case), (
        f"there was: {agent_log(case)[-300:]!r}"
    )


@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_fork_fails(case):
    """A child that is silent for long is given its memory, and its parent continues; one that has
    its userfaultfd and never takes over is killed, and said to be.
    """
    expected = {7: ("child 0", ""), 8: ("child 9", "was killed")}
    started = {}
    for kind in expected:
        words = case.command(case.binary("forklock"), 48, 1, case.seed, "once", options=["--quiet"])
        started[kind] = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**logged(case), "SWAPTIDE_TEST_FAIL": str(kind)},
        )
    for kind, (said, complaint) in expected.items():
        out, errors = started[kind].communicate()
        result = f"kind {kind}: status {started[kind].returncode}, {out!r}, {errors!r}"
        assert started[kind].returncode == 0 and said in out and "OK forklock once" in out, result
        assert complaint in errors, result
    assert "does not respond" in agent_log(case), agent_log(case)[-400:]


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=24, forks=True, complaint="does not register its memory")
def test_fork_unregistered(case):
    """A child of a followed fork that never arms its memory is killed, and said to be; its parent
    continues.
    """
    done = case.run_c(
        "forklock", "once", megabytes=48, seconds=1, env={**os.environ, "SWAPTIDE_TEST_FAIL": "13"}
    )
    assert case.native or "child 9" in done.text(), f"the child was not killed: {done.text()!r}"


def wait_for(case, true, what):
    while not true():
        if case.hung is not None:
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


IGNORES = """if True:
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    held = bytearray(40 << 20)
    print("ready", flush=True)
    time.sleep(7)
    print("lives")
"""


def end_in_stages(case, stages):
    """SIGTERM to the run ends it in every stage of a fork at which the handler waits for
    good. A program that ignores the signal lives.
    """
    programs = {}
    for kind, mode in stages:
        words = case.command(case.binary("forklock"), 48, 1, case.seed, mode, options=["--quiet"])
        programs[kind, mode] = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SWAPTIDE_TEST_FAIL": str(kind)},
        )
    words = case.command(case.python, "-c", IGNORES, ram="32M", options=["--quiet"])
    ignores = subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert ignores.stdout.readline() == "ready\n", "it did not begin"
    ignores.send_signal(signal.SIGTERM)
    for stage, program in programs.items():
        wait_for(case, lambda: stands_inside(program.pid), f"{stage} inside of swaptide")
        time.sleep(0.3)
        program.send_signal(signal.SIGTERM)
    for (kind, mode), program in programs.items():
        out, errors = program.communicate()
        result = f"stage {kind}, {mode}: status {program.returncode}, {out!r}, {errors!r}"
        # Its default action ends the process as soon as the agent looks; what handles the signal is
        # killed, and it is said.
        killed = program.returncode == 137 and "its threads wait inside swaptide; killed" in errors
        ended = program.returncode == 143 and mode == "once"
        assert killed or ended, result
    out, _ = ignores.communicate()
    assert ignores.returncode == 0 and out == "lives\n", (
        f"the program that ignores the signal: {ignores.returncode}, {out!r}"
    )


@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_fork_told_to_end(case):
    end_in_stages(case, [(10, "once"), (12, "handles")])


@pytest.mark.full
@pytest.mark.swaptide(budget=24, swaps=False, native=False)
def test_full_fork_told_to_end(case):
    end_in_stages(case, [(kind, mode) for kind in (10, 11, 12) for mode in ("once", "handles")])


THIEF = r"""
import os, re, select, socket, struct, sys, time
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
tried = 0
while not select.select([0], [], [], 0.0005)[0]:
    for name in set(re.findall(r"@(swaptide-(?:fork|end)\S+)", open("/proc/net/unix").read())):
        thief = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thief.settimeout(0.5)
        try:
            thief.connect("\0" + name)
            tried += 1
            if tried == 1:
                print("one", flush=True)
            token = int(name.rsplit("-", 1)[1], 16) & (1 << 64) - 1
            thief.send(struct.pack("=IIQ", 7, os.getpid(), token))
            data, fds, *_ = socket.recv_fds(thief, 64, 24)
            if fds or data:
                files = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
                print("STOLEN", files, data, flush=True)
                sys.exit(1)
        except OSError:
            pass
        thief.close()
print("tried", tried)
"""


@pytest.mark.full
@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_fork_socket(case):
    """Where pidfd_getfd is not permitted, as in containers, forks work and their children are
    managed; and another user who connects to every visible socket is given nothing."""
    thief = subprocess.Popen(
        [case.python, "-c", THIEF], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    report = case.directory / "report.json"
    confine = [case.python, HERE / "confine.py", PROFILE, "--without", "pidfd_getfd"]
    tree = ([case.binary("forks"), 40, 1, case.seed, "tree"], "OK forks tree")
    maps = ([case.binary("forklock"), 64, 1, case.seed, "maps"], "OK forklock maps")
    for turn, (words, last) in enumerate((tree, maps, tree, maps, tree, maps)):
        # The sockets live for microseconds: until the other user has met one.
        if turn >= 2 and select.select([thief.stdout], [], [], 0)[0]:
            break
        ended = run_confined(case, confine, words, report, env=logged(case))
        assert ended.returncode == 0 and last in ended.stdout, (
            f"{words}: {ended.returncode}: {ended.stdout[-200:]!r} {ended.stderr[-400:]!r}"
        )
    said = thief.communicate()[0]
    assert re.fullmatch(r"one\ntried \d+\n", said), f"the other user: {said!r}"
    unmanaged = [line for line in agent_log(case).splitlines() if "is not managed" in line]
    assert not unmanaged, f"children were not managed: {unmanaged[:3]}"


def run_allocator(case, allocator, seconds):
    """Four threads allocate, one forks: every block and every page has what was written to it."""
    words = [case.binary("forklock"), 64, seconds, case.seed, "allocators"]
    case.compare(["env", f"LD_PRELOAD={allocator}", *words])


@pytest.mark.swaptide(budget=24, allowance=200, forks=True)
def test_fork_jemalloc(case):
    run_allocator(case, library("jemalloc"), 3)


@pytest.mark.full
@pytest.mark.swaptide(budget=24, limit=600, allowance=200, forks=True)
def test_full_fork_allocators(case):
    """As Debian packages them; of musl, the allocator alone."""
    for name in ALLOCATORS:
        run_allocator(case, library(name), case.stretched(6))
    run_allocator(case, musl_allocator(case), case.stretched(6))


PERL = r"""
my %h; for my $i (0..60000){ $h{"k$i"}=[$i,"v" x ($i%60)]; }
my $s=0;
for my $r (0..1){ for my $i (0..60000){
  my $v=$h{"k$i"}; $s=($s*31+$v->[0]+length $v->[1])%1000000007;
} }
print "$s\n";
my @a=sort { $a <=> $b } map { ($_*7919)%1000003 } 0..100000; print "$a[1234]\n"; $|=1;
my $p=fork; if(!$p){ my $t=0; $t+=length $_->[1] for values %h; print "child $t\n"; exit 7 }
waitpid $p,0; print $?>>8,"\n"; print `echo sub`;
my $big="ab" x (6<<20); $big=~s/ab/c/g; print length $big,"\n";
"""


def run_perl(case, times):
    """Forks under an allocator whose own fork handlers change mappings before the child has said
    that it is there."""
    for _ in range(times):
        case.compare(["env", f"LD_PRELOAD={library('jemalloc')}", "perl", "-e", PERL])


@pytest.mark.full
@pytest.mark.swaptide(budget=40, needs=("perl",), allowance=60, forks=True)
def test_fork_perl(case):
    run_perl(case, 1)


@pytest.mark.full
@pytest.mark.swaptide(budget=40, limit=1200, needs=("perl",), allowance=60, forks=True)
def test_full_fork_perl(case):
    run_perl(case, case.stretched(3))


RUBY = r"""
seed = 12345
rand = -> { seed = (seed * 1103515245 + 12345) & 0x7fffffff }
table = {}
60000.times { |i| table["k#{i}"] = "v" * (i % 200) }
sum = -> { table.sum { |k, v| k.size * 31 + v.size } }
threads = 4.times.map do |n|
  Thread.new { 200.times.map { |i| ("x" * ((n + 1) * 1000 + i)).size }.sum }
end
children = (1..ARGV[0].to_i).map do |n|
  pid = fork do
    s = sum.call
    made = 3000.times.map { |i| "c" * (i % 500) }
    exit!((s + made.sum(&:size)) % 200 == (sum.call + made.sum(&:size)) % 200 ? 0 : 1)
  end
  1000.times { table["k#{rand.call % 60000}"] = "w" * (rand.call % 300) }
  Process.wait2(pid)[1].exitstatus
end
puts children.inspect, threads.map(&:value).inspect, sum.call
"""


@pytest.mark.full
@pytest.mark.swaptide(budget=24, limit=600, needs=("ruby",), allowance=100, forks=True)
def test_full_fork_ruby(case):
    """Ruby with threads and forks under jemalloc."""
    case.compare(["env", f"LD_PRELOAD={library('jemalloc')}", "ruby", "-e", RUBY, 20])


@pytest.mark.full
@pytest.mark.swaptide(budget=32, limit=900, needs=("redis-server",), allowance=60, forks=True)
def test_full_fork_redis(case, keys=60000, turns=12):
    """redis-server as packaged (with jemalloc) saves in the background while it is written to,
    again and again; what it has and what it saved is right.
    """
    directory = case.directory / "redis"
    directory.mkdir()
    turn_of = dict.fromkeys(range(keys), 0)

    def serve(name):
        path = case.directory / name
        program = case.start(
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
        return program, Redis(path, lambda: program.process.poll() is None, case.remaining())

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
                assert found == redis_value(number, turn_of[number]), (
                    f"{what}: key {number} is {found!r:.80}"
                )

    program, server = serve("first")
    write(server, range(keys), 0)
    for turn in range(1, turns + 1):
        server.one("BGSAVE")
        write(server, range(turn % 7, keys, 7), turn)
        while server.info("persistence")["rdb_bgsave_in_progress"] != "0":
            assert case.hung is None
            time.sleep(0.05)
        state = server.info("persistence")["rdb_last_bgsave_status"]
        assert state == "ok", (
            f"BGSAVE {turn} ended with {state}: {(program.directory / 'stdout').read_text()[-400:]}"
        )
    check(server, "after all saves")
    server.one("SAVE")
    server.shutdown()
    program.finish()
    second, copy = serve("second")
    check(copy, "loaded from the dump")
    copy.shutdown()
    second.finish()
