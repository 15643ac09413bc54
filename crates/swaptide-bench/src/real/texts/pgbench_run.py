"""A PostgreSQL whose tables fit in its buffers, and pgbench: reads, then transactions.

Prints what the tables hold; the figures go to standard error, a line each: `figure NAME VALUE`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCALE, READS, WRITES = sys.argv[1:]
FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
# The server refuses to run as root.
USER = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
SETTINGS = {
    "shared_buffers": "320MB",
    "listen_addresses": "",
    "fsync": "off",
    "synchronous_commit": "off",
    "huge_pages": "off",
    "autovacuum": "off",
}


class Server:
    def __init__(self, home):
        self.home = home
        self.call("initdb", "-A", "trust", "-D", "db")
        settings = SETTINGS | {"unix_socket_directories": home}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self.process = subprocess.Popen(
            [*USER, FOUND[-1] / "postgres", "-D", "db", *words],
            cwd=home,
            stderr=subprocess.DEVNULL,
        )
        while not Path(home, ".s.PGSQL.5432").exists():
            if self.process.poll() is not None:
                sys.exit("the server ended")
            time.sleep(0.01)

    def call(self, program, *words):
        words = [*USER, FOUND[-1] / program, *words]
        for _ in range(600):
            done = subprocess.run(words, capture_output=True, text=True, cwd=self.home)
            # The socket is there before the server answers.
            if "starting up" not in done.stderr:
                break
            time.sleep(0.05)
        if done.returncode:
            sys.exit(f"{program}: {done.stderr.strip()}")
        return done.stdout

    def bench(self, name, *words):
        common = ["-h", self.home, "-n", "-c", "2", "--random-seed=7"]
        text = self.call("pgbench", *common, "-l", f"--log-prefix={name}", *words, "postgres")
        rate = re.search(r"tps = ([0-9.]+)", text).group(1)
        print(f"figure {name}-per-s {float(rate):.0f}", file=sys.stderr)
        logs = [log.read_text() for log in Path(self.home).glob(f"{name}.*")]
        times = sorted(int(line.split()[2]) for log in logs for line in log.splitlines())
        for percent in (50, 99, 99.9):
            at = times[int(len(times) * percent / 100)]
            print(f"figure {name}-p{percent}-us {at}", file=sys.stderr)


def main():
    home = tempfile.mkdtemp(prefix="swaptide-real-", dir="/var/tmp")
    try:
        os.chmod(home, 0o755)
        shutil.chown(home, "postgres")
        server = Server(home)
        try:
            server.call("pgbench", "-h", home, "-q", "-i", "-s", SCALE, "postgres")
            server.bench("read", "-S", "-t", READS)
            server.bench("write", "-N", "-t", WRITES)
            query = "select count(*), sum(aid), sum(abalance) from pgbench_accounts"
            print(server.call("psql", "-h", home, "-Atc", query, "postgres").strip())
        finally:
            # Fast shutdown.
            server.process.send_signal(2)
            server.process.wait()
    finally:
        shutil.rmtree(home)


main()
