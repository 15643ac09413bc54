"""As much of the Redis protocol as the redis cases need, over a Unix socket."""

import contextlib
import socket
import time


class Redis:
    """A connection; `many` sends commands in one go and returns their answers."""

    def __init__(self, path, alive, seconds):
        """Connects as soon as the server at `path` listens and has loaded its data, while `alive()`
        says it runs.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.settimeout(seconds)
                self._socket.connect(str(path))
                self._file = self._socket.makefile("rb")
                if self.one("PING") == b"PONG":
                    return
            except (OSError, RuntimeError):
                if time.monotonic() > end or not alive():
                    raise
                self._socket.close()
            time.sleep(0.05)

    def many(self, commands):
        words = []
        for command in commands:
            words.append(b"*%d\r\n" % len(command))
            for word in command:
                word = word if isinstance(word, bytes) else str(word).encode()
                words.append(b"$%d\r\n%s\r\n" % (len(word), word))
        self._socket.sendall(b"".join(words))
        return [self._answer() for _ in commands]

    def one(self, *command):
        answer = self.many([command])[0]
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def info(self, section):
        lines = self.one("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def shutdown(self):
        """Ends the server without saving; it answers by closing the connection."""
        with contextlib.suppress(EOFError):
            self.many([["SHUTDOWN", "NOSAVE"]])
        self._socket.close()

    def _answer(self):
        line = self._file.readline()
        if not line:
            raise EOFError("the Redis server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"-":
            return RuntimeError(rest.decode())
        if kind == b"$":
            size = int(rest)
            return None if size < 0 else self._file.read(size + 2)[:-2]
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        raise ValueError(f"Redis answered {line!r}")
