"""`swaptide report`: pictures of runs, from the files that `--report` writes."""

import json
import subprocess
import xml.etree.ElementTree as xml

import pytest

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\x07"
"""A word of the command line, which the report has."""
SERIES = 14
"""Lists of the series, and where it begins."""


def draw(case, *words, status=0):
    """Runs `swaptide report`; answers with what it wrote to its streams."""
    words = [str(word) for word in (case.swaptide, "report", *words)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    said = f"{' '.join(words[1:])}: exit status {done.returncode}: {done.stderr[:300]!r}"
    assert done.returncode == status, f"{said}; expected {status}"
    lines = done.stderr.splitlines()
    assert status == 0 or len(lines) == 1, f"{said}; expected one line"
    return done.stdout, done.stderr


def judge_series(report):
    series, stats = report["series"], report["stats"]
    ends = series["end_s"]
    lists = {name: values for name, values in series.items() if name != "begin_s"}
    assert len(series) == SERIES, f"{sorted(series)}"
    assert {len(values) for values in lists.values()} == {len(ends)}, "lists of several lengths"
    assert 5 <= len(ends) <= 600, f"{len(ends)} points"
    assert ends == sorted(set(ends)) and abs(ends[-1] - report["wall_s"]) < 1, f"{ends[-3:]}"
    assert sum(series["faults"]) == stats["pgmajfault"], "faults are missing"
    came = stats["pswpin"] + stats["zswpin"] + stats["swpin_zero"]
    assert sum(series["pages_in"]) == came, "pages are missing"
    assert max(series["resident_bytes"]) == report["peak_resident_bytes"], "the peak is missing"
    assert max(series["pool_bytes"]) == report["peak_pool_bytes"], "the peak is missing"
    assert set(series["budget_bytes"]) == {report["budget_bytes"]}, "another budget"


@pytest.mark.swaptide(budget=32, native=False)
def test_report(case):
    """A run is recorded, and drawn as a page and as a picture; its command line stays text."""
    script = (
        "import sys; b = bytearray(range(256)) * 2**18; print(sum(b[::4096]) % 9, len(sys.argv))"
    )
    done = case.run([case.python, "-c", script, HOSTILE])
    judge_series(done.report)
    assert done.report["run"]["command"][-1] == HOSTILE, f"{done.report['run']}"
    report = case.directory / "run1" / "report.json"
    page, picture = report.with_suffix(".html"), case.directory / "picture.svg"
    draw(case, report)
    draw(case, report, report, "--svg", picture)
    root = xml.parse(picture).getroot()
    assert root.tag == f"{SVG}svg" and len(root.findall(f"{SVG}g")) == 12, "not two runs"
    assert len(root.findall(f".//{SVG}desc")) == 13, "a chart is not described"
    html = xml.fromstring(page.read_text().partition("\n")[2])
    assert len(html.findall(f".//{SVG}svg[@role='img']")) == 6, "not six charts"
    for text in (page.read_text(), picture.read_text()):
        assert "<script" not in text and "&lt;script&gt;" in text, "the command line is no text"
        assert "\x07" not in text, "a control character"
    out, _ = draw(case, report, "--html", "-", "--svg", picture, "--force")
    assert out == page.read_text(), "another page on standard output"
    # By a link, which an older command would have replaced: /dev/stdout itself is the machine's.
    link, output = case.directory / "link", case.directory / "output"
    link.symlink_to("/dev/stdout")
    with open(output, "w") as file:
        subprocess.run([case.swaptide, "report", report, "--html", link], check=True, stdout=file)
        assert output.read_text() == page.read_text(), "another page by /dev/stdout"
        words = ["run", "--quiet", "--report", link, "--", "true"]
        subprocess.run([case.swaptide, *words], check=True, stdout=file)
    assert link.is_symlink() and output.read_text().startswith(page.read_text() + "{")
    draw(case, report, status=2)
    draw(case, report, "--html", report, "--force", status=2)
    assert json.loads(report.read_text())["run"], "the report was replaced"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_report_bad_input(case):
    """What is no report: exit status 2, one line that says why, and nothing is written."""
    good = case.directory / "good.json"
    case.run(["sleep", "0.2"])
    report = json.loads((case.directory / "run1" / "report.json").read_text())
    good.write_text(json.dumps(report))
    old = {name: value for name, value in report.items() if name != "series"}
    damaged = report | {"series": report["series"] | {"faults": [1]}}
    tries = [
        ("missing.json", None, "missing.json"),
        ("empty.json", "", "not JSON"),
        ("text.json", "no JSON at all", "not JSON"),
        ("cut.json", good.read_text()[:-100], "not JSON"),
        ("other.json", '{"wall_s": 1}', "not a report of swaptide"),
        ("old.json", json.dumps(old), "has no time series"),
        ("untold.json", json.dumps(report | {"series": None}), "has no time series"),
        ("damaged.json", json.dumps(damaged), "a damaged report"),
        ("directory", None, "cannot be read"),
    ]
    (case.directory / "directory").mkdir()
    for name, text, said in tries:
        path = case.directory / name
        if text is not None:
            path.write_text(text)
        before = sorted(case.directory.iterdir())
        page, picture = case.directory / "x.html", case.directory / "x.svg"
        _, error = draw(case, good, path, "--html", page, "--svg", picture, status=2)
        assert name in error and said in error, f"{name}: {error!r}"
        assert sorted(case.directory.iterdir()) == before, f"{name}: something was written"
    for words in (["--html", "/no/such/directory/x"], ["--html", "x", "--svg", "x"], ["--svg"]):
        draw(case, good, *words, status=2)
    draw(case, *[good] * 17, status=2)
    draw(case, status=2)
