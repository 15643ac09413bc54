"""Filters of system calls as programs really set them (filters/), and programs that set them."""

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import filtercode
from harness import full, param
from servers import free_port, listens
from unprivileged import NOBODY

HOWS = ("own", "all", "fork", "exec", "denied")


@pytest.mark.swaptide(budget=24)
@pytest.mark.parametrize(
    ("name", "hows", "otherwise"),
    [
        full("openssh", ("own", "all", "child"), None, id="openssh", allowance=64),
        # The filter ends the thread, which is the only one: the process has to end by SIGSYS.
        param("openssh", ("denied",), None, id="openssh-denied", allowance=16),
        full("chromium", ("own", "all", "fork", "denied"), None, id="chromium", allowance=64),
        param(
            "systemd", HOWS, None, id="systemd", allowance=128, forks=True, marks=[pytest.mark.full]
        ),
        param(
            "systemd",
            HOWS,
            "kill",
            id="systemd-kill",
            allowance=128,
            forks=True,
            marks=[pytest.mark.full],
        ),
        # What is executed under it is not managed: unshare(CLONE_FS) is not on the list.
        full("docker", HOWS, None, id="docker", allowance=128, forks=True),
    ],
)
def test_filter(case, name, hows, otherwise):
    """A program under the filter, in several ways: output and status are what they are without."""
    code = case.directory / "filter"
    code.write_bytes(filtercode.program(name, otherwise))
    for how in hows:
        words = [case.binary("filterlists"), 64, 1, case.seed, name, how, code]
        plain = case.run(words, native=True, status=None)
        swapped = case.run(words, status=plain.status)
        same = plain.text() == swapped.text()
        assert same, f"{how}: {plain.text()!r} without, {swapped.text()!r} with it"
        # What is not on the list ends some of them, by SIGSYS.
        is_right = plain.text().startswith("OK") or how == "denied" and plain.text()
        assert is_right, f"{how}: {plain.status}, {plain.text()!r}"


SUM = """if True:
    import hashlib, os, random
    random.seed({seed})
    blocks = [random.randbytes(2048) * 512 for _ in range(96)]
    for _ in range(2):
        sums = b"".join(hashlib.sha256(block).digest() for block in blocks)
        print(hashlib.sha256(sums).hexdigest())
    print("preloaded" if "LD_PRELOAD" in os.environ else "as it is", file=open({where!r}, "w"))
"""


def sshd_and_ssh(case, native):
    """A server with keys of its own, and a client that has it run a command."""
    place = case.directory / ("native" if native else "swaptide")
    place.mkdir()
    for key in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / key]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    port = free_port()
    (place / "config").write_text(f"""
ListenAddress 127.0.0.1:{port}
HostKey {place}/host
AuthorizedKeysFile {place}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
""")
    where = place / "where"
    (place / "sum.py").write_text(SUM.format(seed=case.seed, where=str(where)))
    words = [shutil.which("sshd"), "-D", "-e", "-f", place / "config"]
    server = case.start(words, native=native)
    for _ in range(200):
        if listens(port):
            break
        time.sleep(0.05)
    user = pwd.getpwuid(os.geteuid()).pw_name
    words = ["ssh", "-F", "none", "-i", place / "user", "-p", port, "-o", "BatchMode=yes"]
    words += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={place}/known"]
    words += ["-o", "LogLevel=ERROR", f"{user}@127.0.0.1", f"{case.python} {place}/sum.py"]
    done = case.run(words, native=native, status=None)
    os.kill(server.pid, signal.SIGTERM)
    served = server.finish(status=None)
    said = f"ssh {done.status}: {done.errors()[-300:]!r}; sshd: {served.errors()[-600:]!r}"
    assert done.status == 0, said
    assert len(done.text().splitlines()) == 2, f"{done.text()!r}; {said}"
    return done, served, where.read_text().strip()


@pytest.mark.full
@pytest.mark.swaptide(
    budget=48, needs=("sshd", "ssh", "ssh-keygen"), allowance=64, swaps=False, forks=True
)
def test_filter_real_ssh(case):
    """sshd, whose child locks itself in before a user has logged in, and ssh; the command of the
    session is managed as well."""
    if os.geteuid() != 0:
        pytest.skip("sshd changes users: it takes root")
    separate = Path("/run/sshd")
    made = not separate.exists()
    if made:
        separate.mkdir(mode=0o755)
    try:
        plain, _, _ = sshd_and_ssh(case, True)
        swapped, served, preloaded = sshd_and_ssh(case, case.native)
    finally:
        if made:
            separate.rmdir()
    assert plain.text() == swapped.text(), f"{plain.text()!r} and {swapped.text()!r}"
    if case.native:
        return
    stats = served.report["stats"]
    out = stats["zswpout"] + stats["pswpout"]
    assert out > 1000, f"{out} pages of the server's tree went out; session {preloaded}"


PAGE = """<!DOCTYPE html><title>sum</title><p id=sum>none</p><script>
let words = new Uint32Array(8 << 20), state = SEED;
for (let at = 0; at < words.length; at++) {
  state = Math.imul(state ^ state >>> 15, 2246822519) + at | 0;
  words[at] = at & 3 ? at >>> 10 : state;
}
let sum = 0;
for (let turn = 0; turn < 3; turn++)
  for (let at = 0; at < words.length; at++) sum = Math.imul(sum, 31) + words[at] | 0;
document.getElementById("sum").textContent = "sum " + sum;
</script>
"""


def render_with_chromium(case, *options):
    """Chromium with its sandbox, as an ordinary user, renders a page whose script sums 32 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    for path in (case.directory, case.directory.parent):
        path.chmod(0o755)
    page = case.directory / "page.html"
    page.write_text(PAGE.replace("SEED", str(case.seed)))

    def words(name):
        home = case.directory / name
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        return [
            "setpriv",
            "--reuid",
            NOBODY,
            "--regid",
            NOBODY,
            "--clear-groups",
            "env",
            f"HOME={home}",
            f"XDG_RUNTIME_DIR={home}",
            "chromium",
            "--headless",
            "--disable-gpu",
            *options,
            "--disable-dev-shm-usage",
            f"--user-data-dir={home}/data",
            "--dump-dom",
            f"file://{page}",
        ]

    plain = case.run(words("plain"), native=True, status=None)
    if plain.status != 0 or "sum " not in plain.text():
        why = plain.errors().strip().splitlines()[-1:] or ["no output"]
        pytest.skip(f"chromium does not run here without swaptide: {why[0][:160]}")
    return plain, case.run(words("swapped"), status=None)


@pytest.mark.full
@pytest.mark.swaptide(
    budget=256, limit=90, needs=("chromium", "setpriv"), allowance=256, swaps=False, forks=True
)
def test_filter_real_chromium(case):
    """Renderers have a process-id namespace of their own and are not managed; the browser is."""
    plain, swapped = render_with_chromium(case, "--in-process-gpu")
    said = f"{swapped.status}: {swapped.text()[-200:]!r} {swapped.errors()[-600:]!r}"
    assert swapped.status == 0 and swapped.text() == plain.text(), said


@pytest.mark.full
@pytest.mark.swaptide(
    budget=256, limit=90, needs=("chromium", "setpriv"), allowance=256, swaps=False, forks=True
)
def test_filter_real_chromium_gpu(case):
    """A process for the GPU needs the zygote without a sandbox, which counts its threads, finds
    swaptide's and ends; the browser gives up then. The limit (docs/semantics.md).
    """
    _, swapped = render_with_chromium(case)
    said = f"{swapped.status}: {swapped.errors()[-600:]!r}"
    assert swapped.status != 0, f"is this still a limit (docs/semantics.md)? {said}"
    assert "GPU process isn't usable" in swapped.errors(), said
