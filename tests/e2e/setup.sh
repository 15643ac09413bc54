# Sourced by ./check and ./demo: finds cargo, installs the Debian packages whose programs are
# missing. It says what it does and asks nothing.

# Where rustup puts cargo, for shells that did not read its profile.
command -v cargo >/dev/null 2>&1 || PATH="$HOME/.cargo/bin:$PATH"

# need PROGRAM:PACKAGE... installs the packages of the programs that are not there; status 1 if that
# cannot be done.
need() {
    local pair missing=()
    if ! command -v cargo >/dev/null 2>&1; then
        echo "setup: cargo is not installed; install a Rust toolchain (rustup) and run this again" >&2
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
    "${as_root[@]}" "${env[@]}" apt-get update -qq </dev/null >/dev/null || echo "setup: apt-get update failed; trying with what is known" >&2
    if ! "${as_root[@]}" "${env[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null; then
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

# need_pytest: a Python with pytest, as $python: the one in use, Debian's, or one in target/tools.
need_pytest() {
    for python in python3 /usr/bin/python3 target/tools/bin/python3; do
        "$python" -m pytest --version >/dev/null 2>&1 && return 0
    done
    python=/usr/bin/python3
    need pytest:python3-pytest 2>/dev/null && "$python" -m pytest --version >/dev/null 2>&1 && return 0
    python=target/tools/bin/python3
    need_tool pytest 'pytest>=7.2'
}

# need_tool NAME REQUIREMENT: a program written in Python, or packaged as such, in target/tools/bin.
need_tool() {
    local tools=target/tools
    if [ ! -x "$tools/bin/pip" ]; then
        python3 -m venv "$tools" >/dev/null 2>&1 || {
            need "venv of $tools:python3-venv" && python3 -m venv --clear "$tools" >/dev/null
        } || return 1
    fi
    echo "setup: installing $2 into $tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check "$2" </dev/null || {
        echo "setup: pip could not install $2" >&2
        return 1
    }
}
