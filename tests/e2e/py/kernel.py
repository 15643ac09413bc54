"""Interrupts, restarts and ends a Jupyter kernel: kernel.py NAME. The last line is `OK kernel`."""

import sys
import time

from jupyter_client.manager import start_new_kernel

INTERRUPTED = """
import time
count = 0
for _ in range(2):
    try:
        time.sleep(3 if count else 60)
    except KeyboardInterrupt:
        count += 1
assert count == 1, f"{count} interrupts of one"
"""


def main():
    manager, client = start_new_kernel(kernel_name=sys.argv[1], startup_timeout=120)

    def wait():
        answer = client.get_shell_msg(timeout=60)["content"]
        assert answer["status"] == "ok", answer

    client.execute("import swaptide; swaptide.stats()")
    wait()
    client.execute(INTERRUPTED)
    time.sleep(2)
    manager.interrupt_kernel()
    wait()
    for now in (False, True):
        manager.restart_kernel(now=now)
        client.wait_for_ready(timeout=60)
        client.execute("swaptide = __import__('swaptide').stats()")
        wait()
    client.stop_channels()
    manager.shutdown_kernel()
    print("OK kernel")


if __name__ == "__main__":
    main()
