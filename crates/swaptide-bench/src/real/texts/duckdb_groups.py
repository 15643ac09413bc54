"""The questions of the h2o group-by benchmark, in memory, with DuckDB."""

import sys

import duckdb

rows = int(sys.argv[1])
db = duckdb.connect(":memory:")
# It would take its limits from the cgroup, and write what does not fit to files.
db.execute("SET threads = 2; SET memory_limit = '64GB'; SET temp_directory = ''")
db.execute(
    f"""CREATE TABLE x AS SELECT 'id' || (hash(i) % 100)::VARCHAR AS id1,
        'id' || (hash(i + 7) % 100)::VARCHAR AS id2,
        'id' || (hash(i + 13) % ({rows} // 100))::VARCHAR AS id3,
        (hash(i + 17) % 100)::INTEGER AS id4, (hash(i + 19) % 100)::INTEGER AS id5,
        (hash(i + 23) % ({rows} // 100))::INTEGER AS id6, (hash(i + 29) % 5 + 1)::INTEGER AS v1,
        (hash(i + 31) % 15 + 1)::INTEGER AS v2, (hash(i + 37) % 100000)::BIGINT AS v3
        FROM range({rows}) t(i)"""
)
QUESTIONS = [
    "SELECT id1, sum(v1) AS a FROM x GROUP BY id1",
    "SELECT id1, id2, sum(v1) AS a FROM x GROUP BY id1, id2",
    "SELECT id3, sum(v1) AS a, avg(v3)::BIGINT FROM x GROUP BY id3",
    "SELECT id6, sum(v1) AS a, sum(v2), sum(v3) FROM x GROUP BY id6",
    "SELECT id3, max(v1) - min(v2) AS a FROM x GROUP BY id3",
    "SELECT id6, median(v3)::BIGINT AS a FROM x GROUP BY id6",
    "SELECT id1, id2, id3, id4, id5, id6, sum(v3) AS a FROM x GROUP BY ALL",
]
for question in QUESTIONS:
    print(*db.execute(f"SELECT count(*), sum(a)::BIGINT FROM ({question})").fetchone())
