//! The real programs.
//!
//! Each takes some seconds and a few hundred MiB on its own, prints a line or a few that follow
//! from its whole work, and prints the same in every run. Those that choose their sizes by the
//! memory that they find (DuckDB, Node.js, the JVM, sort) are told them: a cgroup says something
//! else than the machine, and the two sides are to do the same.

use std::io::{BufWriter, Write};
use std::path::Path;

use crate::workload::phases::mix;

/// Classes in the large C++ file.
const CLASSES: usize = 260;
/// Lines that GNU sort sorts.
const LINES: u64 = 9_000_000;

/// Writes a file.
type WriteFile = fn(&Path) -> std::io::Result<()>;

/// One of the programs.
#[derive(Clone, Copy)]
pub(crate) struct RealProgram {
    /// The name on the command line and in tables.
    pub(crate) name: &'static str,
    /// What it does, in a few words.
    pub(crate) what: &'static str,
    /// Programs (or files, by their paths) that it needs, each with its Debian package.
    pub(crate) packages: &'static [(&'static str, &'static str)],
    /// Python modules that it needs, by their names on PyPI.
    pub(crate) modules: &'static [&'static str],
    /// Its file, and the text of that.
    pub(crate) text: Option<(&'static str, &'static str)>,
    /// A file that it reads, and what writes that.
    pub(crate) input: Option<(&'static str, WriteFile)>,
    /// What is run once, before all measuring: `{dir}` is the directory of all these files.
    pub(crate) prepare: &'static [&'static str],
    /// What is measured: `{python}` is a Python that has the modules.
    pub(crate) words: &'static [&'static str],
    /// Options of `swaptide run` for it.
    pub(crate) options: &'static [&'static str],
}

const NONE: RealProgram = RealProgram {
    name: "",
    what: "",
    packages: &[],
    modules: &[],
    text: None,
    input: None,
    prepare: &[],
    words: &[],
    options: &[],
};

/// All of them.
pub(crate) const PROGRAMS: [RealProgram; 15] = [
    RealProgram {
        name: "objects",
        what: "CPython: a graph of objects",
        text: Some(("objects.py", include_str!("texts/objects.py"))),
        words: &["{python}", "{dir}/objects.py", "400000", "2000000"],
        ..NONE
    },
    RealProgram {
        name: "pandas",
        what: "pandas: group-by, join, sort",
        modules: &["pandas"],
        text: Some(("pandas_frames.py", include_str!("texts/pandas_frames.py"))),
        words: &["{python}", "{dir}/pandas_frames.py", "1200000"],
        ..NONE
    },
    RealProgram {
        name: "polars",
        what: "polars: group-by, join, sort",
        modules: &["polars", "numpy"],
        text: Some(("polars_frames.py", include_str!("texts/polars_frames.py"))),
        words: &["{python}", "{dir}/polars_frames.py", "3000000"],
        ..NONE
    },
    RealProgram {
        name: "duckdb",
        what: "DuckDB: h2o group-by",
        modules: &["duckdb"],
        text: Some(("duckdb_groups.py", include_str!("texts/duckdb_groups.py"))),
        words: &["{python}", "{dir}/duckdb_groups.py", "5000000"],
        ..NONE
    },
    RealProgram {
        name: "learn",
        what: "scikit-learn: training",
        modules: &["scikit-learn"],
        text: Some(("learn.py", include_str!("texts/learn.py"))),
        words: &["{python}", "{dir}/learn.py", "300000"],
        ..NONE
    },
    RealProgram {
        name: "pagerank",
        what: "SciPy: a sparse PageRank",
        modules: &["scipy"],
        text: Some(("pagerank.py", include_str!("texts/pagerank.py"))),
        words: &["{python}", "{dir}/pagerank.py", "800000"],
        ..NONE
    },
    RealProgram {
        name: "g++",
        what: "g++: one large C++ file",
        packages: &[("g++", "g++")],
        input: Some(("large.cpp", large_source)),
        words: &[
            "bash",
            "-o",
            "pipefail",
            "-c",
            "g++ -std=c++20 -O1 -S -o - \"$0\" | md5sum",
            "{dir}/large.cpp",
        ],
        ..NONE
    },
    RealProgram {
        name: "sort",
        what: "GNU sort: lines",
        input: Some(("lines", lines)),
        words: &[
            "bash",
            "-o",
            "pipefail",
            "-c",
            "LC_ALL=C sort -S 2G --parallel=2 \"$0\" | md5sum",
            "{dir}/lines",
        ],
        ..NONE
    },
    RealProgram {
        name: "node",
        what: "Node.js: a graph of objects",
        packages: &[("node", "nodejs")],
        text: Some(("graph.js", include_str!("texts/graph.js"))),
        words: &[
            "node",
            "--max-old-space-size=4096",
            "--max-semi-space-size=16",
            "{dir}/graph.js",
            "600000",
            "3000000",
        ],
        ..NONE
    },
    RealProgram {
        name: "jvm",
        what: "JVM: a graph of objects",
        packages: &[("javac", "default-jdk-headless")],
        text: Some(("Graph.java", include_str!("texts/Graph.java"))),
        prepare: &["javac", "-d", "{dir}", "{dir}/Graph.java"],
        words: &[
            "java",
            "-Xmx1g",
            "-XX:+UseG1GC",
            "-XX:-UseContainerSupport",
            "-cp",
            "{dir}",
            "Graph",
            "2000000",
            "20000000",
        ],
        ..NONE
    },
    RealProgram {
        name: "go",
        what: "Go, static: a graph of objects",
        packages: &[("go", "golang-go")],
        text: Some(("graph.go", include_str!("texts/graph.go"))),
        prepare: &["go", "build", "-o", "{dir}/graph-go", "{dir}/graph.go"],
        words: &["{dir}/graph-go", "2000000", "1000000"],
        options: &["--inject"],
        ..NONE
    },
    RealProgram {
        name: "go-records",
        what: "Go, static: records, four goroutines",
        packages: &[("go", "golang-go")],
        text: Some(("records.go", include_str!("texts/records.go"))),
        prepare: &["go", "build", "-o", "{dir}/records-go", "{dir}/records.go"],
        words: &["{dir}/records-go", "10000000", "50000"],
        options: &["--inject"],
        ..NONE
    },
    RealProgram {
        name: "redis",
        what: "Redis: GET and SET",
        packages: &[("redis-server", "redis-server")],
        text: Some(("redis_requests.py", include_str!("texts/redis_requests.py"))),
        words: &["{python}", "{dir}/redis_requests.py", "300000", "50000"],
        ..NONE
    },
    RealProgram {
        name: "postgres",
        what: "PostgreSQL: pgbench",
        // Clusters are made by hand, and psql stands for the server that comes with it.
        packages: &[("psql", "postgresql"), ("setpriv", "util-linux")],
        text: Some(("pgbench_run.py", include_str!("texts/pgbench_run.py"))),
        words: &["{python}", "{dir}/pgbench_run.py", "16", "20000", "4000"],
        // Its buffers are shared memory.
        options: &["--shared"],
        ..NONE
    },
    RealProgram {
        name: "linux",
        what: "a small Linux: make -j2",
        packages: &[
            ("make", "make"),
            ("gcc", "gcc"),
            ("flex", "flex"),
            ("bison", "bison"),
            ("bc", "bc"),
            ("xz", "xz-utils"),
            ("/usr/include/libelf.h", "libelf-dev"),
            ("/usr/share/doc/linux-source", "linux-source"),
        ],
        text: Some(("linux_build.sh", include_str!("texts/linux_build.sh"))),
        prepare: &["bash", "{dir}/linux_build.sh", "prepare", "{dir}"],
        words: &["bash", "{dir}/linux_build.sh", "build", "{dir}"],
        ..NONE
    },
];

/// Those that rest between requests, for `density`; `{seed}` is another number in each process.
pub(crate) const RESTING_PROGRAMS: [RealProgram; 1] = [RealProgram {
    name: "pandas",
    what: "Python with pandas and its data",
    modules: &["pandas"],
    text: Some(("pandas_rests.py", include_str!("texts/pandas_rests.py"))),
    words: &["{python}", "{dir}/pandas_rests.py", "3600000", "{seed}"],
    ..NONE
}];

/// A C++ file whose compilation has several hundred MiB of trees.
fn large_source(path: &Path) -> std::io::Result<()> {
    let mut out = BufWriter::new(std::fs::File::create(path)?);
    writeln!(
        out,
        "#include <algorithm>\n#include <functional>\n#include <map>\n#include <memory>\n\
        #include <optional>\n#include <regex>\n#include <string>\n#include <tuple>\n\
        #include <unordered_map>\n#include <variant>\n#include <vector>\n"
    )?;
    for n in 0..CLASSES {
        writeln!(
            out,
            "struct T{n} {{ int a; std::string b; std::optional<double> c;
    auto operator<=>(const T{n}&) const = default; }};
using V{n} = std::variant<int, std::string, T{n}, std::vector<T{n}>>;
std::map<std::string, V{n}> m{n};
std::unordered_map<int, std::shared_ptr<T{n}>> u{n};
int f{n}(std::vector<T{n}> v, std::function<bool(const T{n}&)> p) {{
    std::sort(v.begin(), v.end(), [](const T{n}& x, const T{n}& y) {{
        return std::tie(x.a, x.b) < std::tie(y.a, y.b); }});
    v.erase(std::remove_if(v.begin(), v.end(), p), v.end());
    for (auto& t : v) {{ m{n}[t.b] = t; u{n}[t.a] = std::make_shared<T{n}>(t); }}
    int sum = 0;
    for (auto& [k, w] : m{n}) sum += std::visit([&](auto& x) -> int {{
        using X = std::decay_t<decltype(x)>;
        if constexpr (std::is_same_v<X, int>) return x;
        else if constexpr (std::is_same_v<X, T{n}>) return x.a;
        else return int(x.size()); }}, w);
    return sum;
}}"
        )?;
    }
    out.flush()
}

/// Lines of a number and a few words.
fn lines(path: &Path) -> std::io::Result<()> {
    let mut out = BufWriter::new(std::fs::File::create(path)?);
    for n in 0..LINES {
        let word = mix(n);
        writeln!(out, "{:08x} {} {}", word as u32, word >> 50, word >> 40 & 0x3ff)?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_is_whole() {
        for (at, program) in PROGRAMS.iter().enumerate() {
            assert!(PROGRAMS[..at].iter().all(|other| other.name != program.name));
        }
        for program in PROGRAMS.iter().chain(&RESTING_PROGRAMS) {
            assert!(!program.what.is_empty() && !program.words.is_empty(), "{}", program.name);
            let text = program.words.join(" ");
            if let Some((file, _)) = program.text {
                // What is compiled first is named without its suffix.
                let stem = file.strip_suffix(".java").or_else(|| file.strip_suffix(".go"));
                let stem = stem.unwrap_or(file);
                assert!(text.contains(stem), "{} does not run {file}", program.name);
            }
            if let Some((file, _)) = program.input {
                assert!(text.contains(file), "{} does not read {file}", program.name);
            }
            let needs_python = !program.modules.is_empty();
            assert!(!needs_python || text.contains("{python}"), "{}", program.name);
        }
    }
}
