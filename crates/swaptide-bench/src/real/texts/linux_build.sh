#!/usr/bin/env bash
# A build of Linux in its smallest configuration, from Debian's sources.
#     linux_build.sh prepare DIR   unpacks and configures it in DIR, once
#     linux_build.sh build DIR     builds it, and prints a checksum of what came out
set -eu
mode=$1 dir=$2
# What is built does not depend on when and by which user it is built.
export KBUILD_BUILD_TIMESTAMP='Thu Jan  1 00:00:00 UTC 2026' KBUILD_BUILD_USER=u KBUILD_BUILD_HOST=h
if [ "$mode" = prepare ]; then
    [ ! -e "$dir/linux" ] || exit 0
    sources=(/usr/src/linux-source-*.tar.xz)
    rm -rf "$dir/linux.part"
    mkdir "$dir/linux.part"
    tar -xJf "${sources[-1]}" -C "$dir/linux.part" --strip-components=1
    make -s -C "$dir/linux.part" tinyconfig
    mv "$dir/linux.part/.config" "$dir/linux.config"
    make -s -C "$dir/linux.part" mrproper
    mv "$dir/linux.part" "$dir/linux"
    exit 0
fi
rm -rf "$dir/linux-build"
mkdir "$dir/linux-build"
cp "$dir/linux.config" "$dir/linux-build/.config"
make -s -C "$dir/linux" O="$dir/linux-build" -j2 vmlinux >&2
md5sum <"$dir/linux-build/vmlinux"
rm -rf "$dir/linux-build"
