"""An in-memory SQLite database with two tables, an index, a join over them and updates; prints what
the queries answer.

sql.py ROWS SEED
"""

import random
import sqlite3
import sys


def main():
    rows, seed = int(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(seed)
    base = sqlite3.connect(":memory:")
    base.execute("pragma temp_store = memory")
    base.execute("create table buyer (id integer primary key, name text, town text)")
    base.execute(
        "create table sale (id integer primary key, buyer integer, price integer, note text)"
    )
    buyers = rows // 10
    base.executemany(
        "insert into buyer values (?, ?, ?)",
        (
            (i, f"name-{draw.getrandbits(64):016x}", f"town-{draw.randrange(200)}")
            for i in range(buyers)
        ),
    )
    base.executemany(
        "insert into sale values (?, ?, ?, ?)",
        (
            (
                i,
                draw.randrange(buyers),
                draw.randrange(10000),
                f"note {draw.getrandbits(128):x} " + "." * 60,
            )
            for i in range(rows)
        ),
    )
    base.execute("create index sale_buyer on sale (buyer)")
    query = (
        "select town, count(*), sum(price), min(note) from buyer join sale on buyer.id = "
        "sale.buyer "
        "group by town order by 3 desc, town limit 20"
    )
    for row in base.execute(query):
        print(*row)
    base.execute("update sale set price = price + 1 where id % 7 = 0")
    base.execute("delete from sale where buyer in (select id from buyer where town = 'town-7')")
    print(*base.execute("select count(*), sum(price), sum(length(note)) from sale").fetchone())
    print(*base.execute("pragma integrity_check").fetchone())


main()
