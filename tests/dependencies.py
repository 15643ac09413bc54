#!/usr/bin/env python3
"""Checks the dependencies of the workspace and of the fuzz workspace, from `cargo metadata`.

- Licences: every package has one that LICENCES allows. Packages of LINKED_ALONE may have another.
- Sources: every package comes from one registry, or from this repository.
- Bans: none of BANNED is in the graph.
- Duplicates: no package is there in two versions for what is built and shipped, but for
  KNOWN_DUPLICATES.
- Unused: every dependency that a crate declares is named in its code, and every one that the
  workspace declares is used by a crate.
- Documented: docs/dependencies.md names every direct dependency in the section of its crate.

Advisories are not checked: their database has to be fetched, and this check works offline
(docs/adr/0013-own-check-of-dependencies.md).

Usage: dependencies.py          Exit status 1, and a line for each error, where there is one.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LICENCES = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
# What would bring a second TLS library, a build with cmake, or a runtime.
BANNED = {"openssl", "openssl-sys", "native-tls", "aws-lc-rs", "aws-lc-sys", "tokio", "async-std"}
# Each with what needs the older version.
KNOWN_DUPLICATES = {
    "signal-hook": "crossterm, of ratatui",
    "syn": "procedural macros of strum and derive_more, of ratatui; at build time only",
    "winnow": "toml",
}


def metadata(directory):
    command = ["cargo", "metadata", "--format-version=1", "--locked"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"dependencies: cargo metadata in {directory} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def is_allowed(expression):
    """Whether an SPDX expression can be met with LICENCES. OR binds weaker than AND."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def either():
        met = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = both() or met
        return met

    def both():
        met = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = one() and met
        return met

    def one():
        token = tokens.pop(0)
        if token == "(":
            met = either()
            tokens.pop(0)
            return met
        if len(tokens) > 1 and tokens[0] == "WITH":
            token += " WITH " + tokens[1]
            del tokens[:2]
        return token in LICENCES

    return either()


def licences(packages):
    for package in packages:
        name = f"{package['name']} {package['version']}"
        if not package["license"]:
            yield f"{name} declares no licence expression"
        elif not is_allowed(package["license"]):
            yield f"{name}: the licence {package['license']} is not allowed"


def sources(packages):
    found = {package["source"] for package in packages if package["source"]}
    registries = {source for source in found if source.startswith("registry+")}
    for source in sorted(found - registries):
        yield f"packages come from {source}, which is no registry"
    if len(registries) > 1:
        yield f"packages come from several registries: {', '.join(sorted(registries))}"
    for package in packages:
        if not package["source"] and not package["manifest_path"].startswith(f"{ROOT}/"):
            yield f"{package['name']} is outside of this repository"
        if package["name"] in BANNED:
            yield f"{package['name']} is banned"


def shipped(data):
    """The ids of what the members are built from, without the dependencies of tests."""
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    seen, queue = set(), list(data["workspace_members"])
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        for dep in nodes[node]["deps"]:
            if any(kind["kind"] != "dev" for kind in dep["dep_kinds"]):
                queue.append(dep["pkg"])
    return seen


def duplicates(data):
    versions = {}
    kept = shipped(data)
    for package in data["packages"]:
        if package["id"] in kept:
            versions.setdefault(package["name"], []).append(package["version"])
    for name, found in sorted(versions.items()):
        if len(found) > 1 and name not in KNOWN_DUPLICATES:
            yield f"{name} is there in versions {', '.join(sorted(found))}"
    for name in sorted(KNOWN_DUPLICATES):
        if len(versions.get(name, [])) < 2:
            yield f"{name} is no longer there twice: take it out of KNOWN_DUPLICATES"


def unused(data):
    members = set(data["workspace_members"])
    for package in data["packages"]:
        if package["id"] not in members:
            continue
        folder = Path(package["manifest_path"]).parent
        text = "\n".join(path.read_text() for path in sorted(folder.rglob("*.rs")))
        text = re.sub(r"^\s*//.*$", "", text, flags=re.M)
        for dep in package["dependencies"]:
            name = (dep["rename"] or dep["name"]).replace("-", "_")
            if not re.search(rf"\b(?:{name}::|use {name}\b|extern crate {name}\b)", text):
                yield f"{package['name']} declares {dep['name']} and does not use it"


def undeclared():
    root = tomllib.loads((ROOT / "Cargo.toml").read_text())
    manifests = [path.read_text() for path in sorted(ROOT.glob("crates/*/Cargo.toml"))]
    for name in root["workspace"]["dependencies"]:
        if not any(re.search(rf"^{re.escape(name)}(\.workspace)?\s*=", m, re.M) for m in manifests):
            yield f"the workspace declares {name}, which no crate uses"


def undocumented(data):
    text = (ROOT / "docs" / "dependencies.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    members = set(data["workspace_members"])
    for package in data["packages"]:
        if package["id"] not in members:
            continue
        section = sections.get(package["name"], "")
        for dep in package["dependencies"]:
            if dep["source"] and f"`{dep['name']}`" not in section:
                yield f"docs/dependencies.md does not say why {package['name']} uses {dep['name']}"


def main():
    found = []
    for directory in (ROOT, ROOT / "fuzz"):
        data = metadata(directory)
        found += licences(data["packages"])
        found += sources(data["packages"])
        found += unused(data)
        if directory == ROOT:
            found += duplicates(data)
            found += undocumented(data)
    found += undeclared()
    for error in sorted(set(found)):
        print(f"dependencies: {error}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
