"""A service with tables in memory: reads a file of rows, keeps them by key and by word, then
answers requests on a socket.
"""

import socket
import sys

path, address = sys.argv[1], sys.argv[2]
rows, words = {}, {}
with open(path) as file:
    for line in file:
        key, name, number, text = line.rstrip("\n").split(",", 3)
        row = (name, int(number), text.split(" "))
        rows[int(key)] = row
        words.setdefault(row[2][0], []).append(int(key))
keys = sorted(rows)


def answer(seed):
    total = 0
    for step in range(20000):
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        name, number, text = rows[keys[seed % len(keys)]]
        total = (total * 31 + number + len(name) + len(text)) & 0xFFFFFFFF
        if step % 100 == 0:
            total += len(words[text[0]])
    return total & 0xFFFFFFFF


server = socket.socket(socket.AF_UNIX)
server.bind(address)
server.listen()
while True:
    client, _ = server.accept()
    with client:
        seed = int(client.recv(100).decode())
        client.sendall(b"%d\n" % answer(seed))
