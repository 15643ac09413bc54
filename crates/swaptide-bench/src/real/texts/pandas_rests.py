"""Python with pandas and a few hundred MiB of data, as a notebook or a service has it: it answers
a request, a line of its standard input, and rests until the next one.

Prints `ready ANSWER` when the data is there, and the answer again for each request.
"""

import sys

import numpy
import pandas

ROWS, SEED = int(sys.argv[1]), int(sys.argv[2])


def answer(sales):
    totals = sales.groupby("shop")["price"].agg(["sum", "max"])
    dear = sales.loc[sales["price"] > 1500, "amount"].sum()
    return f"{totals['sum'].sum():.2f} {totals['max'].sum():.2f} {dear}"


def main():
    draw = numpy.random.default_rng(SEED)
    names = numpy.array([f"customer {number} of {SEED}" for number in range(20000)], dtype=object)
    sales = pandas.DataFrame(
        {
            "when": numpy.cumsum(draw.integers(0, 60, ROWS)),
            "shop": draw.integers(0, 1000, ROWS),
            "amount": draw.integers(1, 20, ROWS),
            "price": draw.gamma(2, 200, ROWS).round(2),
            "customer": names[draw.integers(0, len(names), ROWS)],
        }
    )
    by_shop = sales.sort_values(["shop", "when"], ignore_index=True)
    print("ready", answer(sales), flush=True)
    for _ in sys.stdin:
        print(answer(sales), flush=True)
    # It stays until the end.
    del by_shop


main()
