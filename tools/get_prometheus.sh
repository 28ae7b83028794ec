#!/usr/bin/env bash
# Put prometheus and promtool where the stack tests look for them, if they are not there yet.
#
#   tools/get_prometheus.sh
#
# They land in $OTEL_TRAIN_TEST_BIN (default: otel-train/bin below the user's cache folder). On Debian and
# its relatives the distribution's packages are unpacked there, and nothing is installed system-wide. On
# other systems put prometheus and promtool, 2.45 or later, into that folder, or anywhere on PATH.
set -euo pipefail

suite=trixie
bin=${OTEL_TRAIN_TEST_BIN:-${XDG_CACHE_HOME:-$HOME/.cache}/otel-train/bin}

works() {
    "$bin/prometheus" --version >/dev/null 2>&1 && "$bin/promtool" --version >/dev/null 2>&1
}

if works; then
    exit 0
fi

mkdir -p "$bin"
for program in prometheus promtool; do
    if command -v "$program" >/dev/null && [ ! -e "$bin/$program" ]; then
        ln -s "$(command -v "$program")" "$bin/$program"
    fi
done
if works; then
    exit 0
fi

unpacked=$(mktemp -d "$bin/.debian.XXXXXX")
trap 'rm -rf "$unpacked"' EXIT
if ! "$(dirname "$0")/debian_packages.sh" "$unpacked" "$suite" prometheus promtool; then
    echo "$0: Debian's packages could not be fetched. Put prometheus and promtool, 2.45 or later, into $bin" >&2
    exit 1
fi
for program in prometheus promtool; do
    mv -f "$unpacked/root/usr/bin/$program" "$bin/$program"
done
if ! works; then
    echo "$0: the programs in $bin do not run here. Replace them with a build for this system" >&2
    exit 1
fi
"$bin/prometheus" --version | head -n 1
