"""Builds large dicts, lists, sets and a bytearray, works on them in several ways and prints
checksums of what it finds.

structures.py SCALE SEED [--progress]     about 3 MB of Python objects per unit of SCALE
"""

import random
import sys
import zlib


def progress(text):
    if "--progress" in sys.argv:
        print(f"  {text}", file=sys.stderr, flush=True)


def main():
    scale, seed = int(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(seed)
    people = {}
    for number in range(scale * 5000):
        person = {
            "id": number,
            "name": f"name {draw.randrange(10**6)}",
            "tags": [number % 7, number % 11],
        }
        people[f"person-{number:08d}"] = person
        if number % (scale * 500) == 0:
            progress(f"building a dict: {number} entries")
    progress("building lists and a set")
    numbers = [draw.random() for _ in range(scale * 20000)]
    words = {f"{draw.randrange(10**9):x}" for _ in range(scale * 2000)}
    raw = bytearray(draw.randbytes(scale << 18))
    progress("walking the dict in order")
    total = 0
    for key, person in people.items():
        total = (total * 31 + person["id"] + person["tags"][1] + len(person["name"]) + len(key)) % (
            1 << 61
        )
    print("dict", len(people), total)
    progress("looking entries up at random and changing them")
    for _ in range(scale * 1500):
        number = draw.randrange(len(people))
        person = people[f"person-{number:08d}"]
        if person["id"] != number:
            print("wrong person", number, person)
            sys.exit(3)
        person["tags"].append(number & 255)
    print("changed", sum(len(person["tags"]) for person in people.values()))
    progress("sorting")
    numbers.sort()
    print(
        "list", len(numbers), f"{sum(numbers[::97]):.6f}", numbers[0] <= numbers[1] <= numbers[-1]
    )
    print("set", len(words), zlib.crc32("".join(sorted(words)).encode()))
    for at in range(0, len(raw), 4099):
        raw[at] ^= 255
    print("bytes", len(raw), zlib.crc32(raw))
    progress("copying the dict, dropping the old one")
    copied = {key: dict(person) for key, person in people.items() if person["id"] % 3}
    people.clear()
    print("copy", len(copied), sum(person["id"] for person in copied.values()))


main()
