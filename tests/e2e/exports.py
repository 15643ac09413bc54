"""NBD servers as an operator runs them, and what is behind them: the recipes of docs/network.md.

Every server listens on a port of 127.0.0.1 that stays its own, so that it can be killed and started
again. What its case does not end is ended with the case.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from documents import block
from processes import descendants
from servers import free_port, listens

START_SECONDS = 60


def ready_or_ended(process, port, log):
    """Waits until the process listens there, or fails with what the process said."""
    end = time.monotonic() + START_SECONDS
    while not listens(port):
        said = f"{log.read_text(errors='replace')[-600:]!r}"
        assert process.poll() is None, f"it ended with status {process.returncode}: {said}"
        assert time.monotonic() < end, f"nothing listens after {START_SECONDS} s: {said}"
        time.sleep(0.05)


def left_out(why):
    """As the fixture `case` does for a program that is not installed."""
    if os.environ.get("SWAPTIDE_TEST_ALL") == "1":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


class Process:
    """A process of the case with a log, that listens on a port of its own."""

    def __init__(self, case, name, port=None):
        self.directory = case.directory / name
        self.directory.mkdir()
        self.log = self.directory / "log"
        self.port = port or free_port()
        self.process = None
        case.at_end(self.kill)

    def words(self):
        raise NotImplementedError

    def env(self):
        return None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in self.words()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env(),
            )
        ready_or_ended(self.process, self.port, self.log)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.process is not None:
            # One that a case has stopped is ended by that, too.
            self.process.kill()
            self.process.wait()


class Export(Process):
    """A server; `tls` is a directory of `certificates`."""

    keeps = True
    """Its data is there again when it was killed and started again."""

    def __init__(self, case, name, tls=None, **how):
        super().__init__(case, name)
        self.tls = tls
        self.prepare(case, **how)
        self.start()

    def prepare(self, case):
        """What has to be there before the server."""

    def url(self, ca=None, identity=True):
        place = f"127.0.0.1:{self.port}/swap"
        if self.tls is None:
            return f"nbd://{place}"
        options = [f"ca={ca or self.tls / 'ca-cert.pem'}"]
        if identity:
            options += [f"cert={self.tls}/client-cert.pem", f"key={self.tls}/client-key.pem"]
        return f"nbds://{place}?{'&'.join(options)}"


class Nbdkit(Export):
    """nbdkit with a plugin, and filters in front of it."""

    filters = ()

    def words(self):
        words = ["nbdkit", "--foreground", "--ipaddr", "127.0.0.1", "--port", self.port]
        if self.tls is not None:
            words += ["--tls", "require", f"--tls-certificates={self.tls}", "--tls-verify-peer"]
        return [*words, *self.filters, *self.plugin()]

    def plugin(self):
        raise NotImplementedError


class Memory(Nbdkit):
    """Memory of the server's machine."""

    keeps = False

    def prepare(self, case, delay=None):
        if delay is not None:
            self.filters = ["--filter=delay"]
        self.delays = [] if delay is None else [f"rdelay={delay}", f"wdelay={delay}"]

    def plugin(self):
        return ["memory", "1G", *self.delays]


class File(Nbdkit):
    """A sparse file."""

    def prepare(self, case):
        self.image = self.directory / "swap.img"
        with open(self.image, "wb") as file:
            file.truncate(1 << 30)

    def plugin(self):
        return ["file", self.image]


class Sshd(Process):
    """A machine with nothing but sshd, which has keys of its own."""

    def __init__(self, case):
        super().__init__(case, "sshd")
        if os.geteuid() != 0:
            pytest.skip("sshd changes users: it takes root")
        Path("/run/sshd").mkdir(exist_ok=True)
        # libssh asks for the key of this name, of all that a host may have.
        for key in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.directory / key]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        kind, key = (self.directory / "host.pub").read_text().split()[:2]
        self.known = self.directory / "known"
        self.known.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")
        (self.directory / "config").write_text(f"""
ListenAddress 127.0.0.1:{self.port}
HostKey {self.directory}/host
AuthorizedKeysFile {self.directory}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
Subsystem sftp internal-sftp
""")
        self.start()

    def words(self):
        return [shutil.which("sshd"), "-D", "-e", "-f", self.directory / "config"]

    def kill(self):
        """With the processes of its sessions, as when the machine goes."""
        if self.process is not None and self.process.poll() is None:
            sessions = list(descendants(self.process.pid))
            super().kill()
            for pid in sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Ssh(Nbdkit):
    """A file on a machine that has sshd."""

    filters = ("--filter=retry",)

    def prepare(self, case):
        self.behind = Sshd(case)
        self.image = self.directory / "swap.img"
        with open(self.image, "wb") as file:
            file.truncate(1 << 30)

    def plugin(self):
        keys = self.behind.directory
        return [
            "ssh",
            "host=127.0.0.1",
            f"port={self.behind.port}",
            f"user={pwd.getpwuid(os.geteuid()).pw_name}",
            "config=",
            f"identity={keys}/user",
            f"known-hosts={self.behind.known}",
            f"path={self.image}",
            "retries=30",
            "retry-delay=1",
            "retry-exponential=no",
        ]


S3_KEYS = {
    "AWS_ACCESS_KEY_ID": "swaptide",
    "AWS_SECRET_ACCESS_KEY": "swaptide",
    "AWS_DEFAULT_REGION": "us-east-1",
}


class Moto(Process):
    """A server of S3 that keeps its objects in memory."""

    def __init__(self, case):
        super().__init__(case, "moto")
        self.start()

    def words(self):
        return ["moto_server", "-H", "127.0.0.1", "-p", self.port]


class S3(Nbdkit):
    """Objects of 64 KiB in a bucket. The filter blocksize lets requests be of any size: nbdkit
    takes no smallest request above 64 KiB, and swaptide none above a page.
    """

    filters = ("--filter=blocksize",)

    def prepare(self, case):
        self.behind = Moto(case)
        end = time.monotonic() + START_SECONDS
        url = f"http://127.0.0.1:{self.behind.port}"
        make = "import sys, boto3; boto3.client('s3', endpoint_url=sys.argv[1])"
        make += ".create_bucket(Bucket='swap')"
        # nbdkit's plugin runs in Debian's Python, and so has its boto3.
        words = ["/usr/bin/python3", "-c", make, url]
        while True:
            made = subprocess.run(words, env=self.env(), capture_output=True, text=True)
            if made.returncode == 0:
                break
            assert time.monotonic() < end, f"no bucket: {made.stderr[-400:]}"

    def env(self):
        # A Python looks for its modules near the first one of the path.
        return {**os.environ, **S3_KEYS, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

    def plugin(self):
        return [
            "S3",
            f"endpoint-url=http://127.0.0.1:{self.behind.port}",
            "size=1G",
            "object-size=64K",
            "bucket=swap",
            "key=host1",
        ]


class QemuNbd(Export):
    """qemu-nbd with an image in a format."""

    format = "raw"
    cache = "writeback"

    def prepare(self, case):
        self.image = self.directory / "swap.img"
        words = ["qemu-img", "create", "-q", "-f", self.format, self.image, "1G"]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)

    def words(self):
        words = [
            "qemu-nbd",
            "--persistent",
            "--shared=0",
            "--bind=127.0.0.1",
            f"--port={self.port}",
        ]
        words += ["--export-name=swap", f"--format={self.format}", "--discard=unmap"]
        words += ["--detect-zeroes=unmap", f"--cache={self.cache}"]
        if self.tls is not None:
            creds = f"tls-creds-x509,id=tls0,endpoint=server,dir={self.tls},verify-peer=yes"
            words += ["--object", creds, "--tls-creds=tls0"]
        return [*words, self.image]


class Qcow2Writeback(QemuNbd):
    """An image that grows by what is written. qemu-nbd keeps its tables in memory until it is asked
    to flush, which swaptide never does.
    """

    format = "qcow2"
    keeps = False


class Qcow2(Qcow2Writeback):
    """The same with tables that are written at once."""

    cache = "writethrough"
    keeps = True


CEPH_CONFIG = """[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data = {place}/mon
osd data = {place}/osd
log file = {place}/$name.log
run dir = {place}
admin socket = {place}/$name.asok
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 2147483648
osd memory target = 939524096
osd memory cache min = 67108864
osd op num shards = 2
"""


class Ceph:
    """A cluster of one monitor and one OSD, with an image in a pool."""

    def __init__(self, case):
        self.place = case.directory / "ceph"
        for name in (".", "mon", "osd"):
            (self.place / name).mkdir()
        self.config = self.place / "ceph.conf"
        port, fsid = free_port(), str(uuid.uuid4())
        self.config.write_text(CEPH_CONFIG.format(fsid=fsid, port=port, place=self.place))
        self.processes = {}
        case.at_end(self.end)
        monmap = self.place / "monmap"
        self.do(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v2:127.0.0.1:{port}]",
            monmap,
        )
        self.do("ceph-mon", "-c", self.config, "--mkfs", "-i", "a", "--monmap", monmap)
        self.start("mon", "a")
        osd = str(uuid.uuid4())
        self.do("ceph", "-c", self.config, "--connect-timeout", START_SECONDS, "osd", "new", osd)
        self.do("ceph-osd", "-c", self.config, "-i", 0, "--mkfs", "--osd-uuid", osd)
        self.start("osd", "0")
        self.do("ceph", "-c", self.config, "osd", "pool", "create", "rbd", 8)
        features = ["--image-feature", "layering"]
        self.do("rbd", "-c", self.config, "create", "rbd/swap", "--size", "1G", *features)

    def do(self, *words):
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * START_SECONDS,
        )
        assert done.returncode == 0, f"{words[0]}: status {done.returncode}: {done.stderr[-600:]}"

    def start(self, kind, name):
        with open(self.place / f"{kind}.out", "ab") as log:
            words = [f"ceph-{kind}", "-c", str(self.config), "-i", name, "-f"]
            self.processes[kind] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.place
            )

    def kill(self, kind="osd"):
        self.processes[kind].kill()
        self.processes[kind].wait()

    def end(self):
        for kind in list(self.processes):
            self.kill(kind)


class Rbd(QemuNbd):
    """An image of a Ceph cluster, by qemu's driver for it."""

    def prepare(self, case):
        if not list(Path("/usr/lib").glob("*/qemu/block-rbd.so")):
            left_out("not installed: qemu-block-extra (./check --full installs it)")
        self.behind = Ceph(case)
        self.image = f"rbd:rbd/swap:conf={self.behind.config}"


KINDS = {
    "memory": (Memory, ("nbdkit",)),
    "file": (File, ("nbdkit",)),
    "ssh": (Ssh, ("nbdkit", "sshd", "ssh-keygen")),
    "s3": (S3, ("nbdkit", "moto_server")),
    "raw": (QemuNbd, ("qemu-nbd", "qemu-img")),
    "qcow2": (Qcow2, ("qemu-nbd", "qemu-img")),
    "qcow2-writeback": (Qcow2Writeback, ("qemu-nbd", "qemu-img")),
    "rbd": (Rbd, ("qemu-nbd", "ceph", "ceph-mon", "ceph-osd", "rbd")),
}
"""The servers by name, and the programs that each needs."""


def certificates(directory):
    """An authority, a server of 127.0.0.1 and a client of it: the lines of docs/network.md."""
    directory.mkdir()
    script = block("docs/network.md", "key=").replace("192.0.2.1", "127.0.0.1")
    done = subprocess.run(
        ["sh", "-euc", script], cwd=directory, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == 0, f"openssl: {done.stderr[-400:]}"
    return directory
