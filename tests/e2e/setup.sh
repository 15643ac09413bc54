# shellcheck shell=bash
# Sourced by ./check and ./demo: finds cargo, installs the Debian packages whose programs are
# missing. It says what it does and asks nothing.

# Where rustup puts cargo, for shells that did not read its profile.
command -v cargo >/dev/null 2>&1 || PATH="$HOME/.cargo/bin:$PATH"

# need PROGRAM:PACKAGE... installs the packages of the programs that are not there; status 1 if that
# cannot be done.
need() {
    local pair missing=()
    if ! command -v cargo >/dev/null 2>&1; then
        echo "setup: cargo is not installed; install Rust (rustup) and run this again" >&2
        return 1
    fi
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || missing+=("${pair#*:}")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        # -n: fails where sudo would ask for a password.
        if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
            as_root=(sudo -n)
        else
            echo "setup: missing packages, and no permission to install them: ${missing[*]}" >&2
            return 1
        fi
    fi
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "setup: missing, and no apt-get to install them with: ${missing[*]}" >&2
        return 1
    fi
    echo "setup: installing ${missing[*]}"
    # RUNLEVEL=1: redis-server's package starts no service of its own.
    local env=(env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1)
    "${as_root[@]}" "${env[@]}" apt-get update -qq </dev/null >/dev/null ||
        echo "setup: apt-get update failed; trying with what is known" >&2
    local install=(apt-get install -y -qq --no-install-recommends)
    if ! "${as_root[@]}" "${env[@]}" "${install[@]}" "${missing[@]}" </dev/null >/dev/null; then
        echo "setup: apt-get could not install ${missing[*]}" >&2
        return 1
    fi
}

# need_component NAME COMMAND...: a part of the toolchain that rustup may have left out.
need_component() {
    local name=$1
    shift
    "$@" >/dev/null 2>&1 && return 0
    echo "setup: adding $name to the Rust toolchain"
    rustup component add "$name" >/dev/null 2>&1 || {
        echo "setup: $name is missing and rustup could not add it" >&2
        return 1
    }
}

# Tools written in Python, or packaged as such, that the machine lacks or has in another version.
tools=target/tools

# need_pytest: a Python with pytest, as $python: the one in use, Debian's, or one in target/tools.
need_pytest() {
    for python in python3 /usr/bin/python3 "$tools/bin/python3"; do
        "$python" -m pytest --version >/dev/null 2>&1 && return 0
    done
    python=/usr/bin/python3
    need no-pytest:python3-pytest && "$python" -m pytest --version >/dev/null 2>&1 && return 0
    python=$tools/bin/python3
    pip_install 'pytest>=7.2'
}

# need_tools FILE: the programs of a list of NAME==VERSION, for `tool`.
need_tools() {
    local name version missing=()
    while IFS='=' read -r name _ version; do
        case $name in
            '' | '#'*) ;;
            *)
                [[ $(tool "$name" --version 2>/dev/null) = *"$version"* ]] ||
                    missing+=("$name==$version")
                ;;
        esac
    done <"$1"
    [ ${#missing[@]} -eq 0 ] || pip_install "${missing[@]}"
}

# tool_path NAME: the path of a program of need_tools.
tool_path() {
    if [ -x "$tools/bin/$1" ]; then echo "$tools/bin/$1"; else command -v "$1"; fi
}

# tool NAME ARGUMENTS...: runs a program of need_tools.
tool() {
    local path
    path=$(tool_path "$1") || return 127
    shift
    "$path" "$@"
}

# pip_install REQUIREMENT...: into target/tools.
pip_install() {
    echo "setup: installing $* into $tools"
    if [ ! -x "$tools/bin/pip" ] && ! python3 -m venv "$tools" >/dev/null 2>&1; then
        need no-venv:python3-venv && python3 -m venv --clear "$tools" >/dev/null || return 1
    fi
    "$tools/bin/pip" install --quiet --disable-pip-version-check "$@" </dev/null || {
        echo "setup: pip could not install $*" >&2
        return 1
    }
}

# need_modules FILE: the Python modules of a list of NAME==VERSION, in target/tools.
need_modules() {
    "$tools/bin/python3" - "$1" 2>/dev/null <<'END' || pip_install -r "$1"
import importlib.metadata, sys
for line in open(sys.argv[1]):
    name, _, version = line.strip().partition("==")
    if version and importlib.metadata.version(name) != version:
        sys.exit(1)
END
}
