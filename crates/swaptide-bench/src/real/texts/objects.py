"""A graph of Python objects: built, walked at random, changed, and summed up at the end."""

import random
import sys


class Node:
    __slots__ = ("links", "name", "value")

    def __init__(self, name, value):
        self.name = name
        self.value = value
        self.links = []


def main():
    count, steps = int(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(7)
    nodes = {}
    for number in range(count):
        name = f"node-{number:08d}"
        nodes[name] = Node(name, {"number": number, "weight": draw.random()})
    names = list(nodes)
    for number, name in enumerate(names):
        # Most links lead near, as in what was made together.
        for _ in range(4):
            near = min(count - 1, max(0, number + int(draw.gauss(0, 500))))
            target = near if draw.random() < 0.9 else draw.randrange(count)
            nodes[name].links.append(nodes[names[target]])
    at, total = nodes[names[0]], 0.0
    for step in range(steps):
        total += at.value["weight"]
        at.value["seen"] = at.value.get("seen", 0) + 1
        at = draw.choice(at.links)
        if step % 97 == 0:
            at = nodes[names[draw.randrange(count)]]
    seen = sum(node.value.get("seen", 0) for node in nodes.values())
    print(f"{total:.6f} {seen} {len(nodes)}")


main()
