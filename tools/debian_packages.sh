#!/usr/bin/env bash
# Unpack packages of a Debian suite into a folder of their own; nothing is installed system-wide.
#
#   tools/debian_packages.sh DIR SUITE PACKAGE...
#
# The programs are then in DIR/root/usr/bin. The mirror and its key are those this machine's apt uses.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
for program in apt-get dpkg; do
    if ! command -v "$program" >/dev/null; then
        echo "$0: $program not found: this works on Debian and its relatives only" >&2
        exit 3
    fi
done

dir=$(mkdir -p "$1" && cd "$1" && pwd)
suite=$2
shift 2

# One component of the main archive that this machine reads; security and update suites have other paths.
site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Label: Debian' | sort -u | head -n 1)
if [ -z "$site" ]; then
    echo "$0: apt knows no Debian mirror; run 'apt-get update' once, as root" >&2
    exit 3
fi

mkdir -p "$dir"/apt/{lists/partial,cache/archives/partial,etc/apt.conf.d,etc/preferences.d} "$dir"/debs "$dir"/root
: >"$dir/apt/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $suite main" >"$dir/apt/etc/sources.list"
cat >"$dir/apt/apt.conf" <<CONF
Dir::State "$dir/apt";
Dir::State::status "$dir/apt/status";
Dir::State::lists "$dir/apt/lists";
Dir::Cache "$dir/apt/cache";
Dir::Etc "$dir/apt/etc";
Dir::Etc::sourcelist "$dir/apt/etc/sources.list";
Dir::Etc::sourceparts "/dev/null";
APT::Sandbox::User "$(id -un)";
Acquire::Languages "none";
CONF

# The machine's own settings (a proxy, say) still hold: APT_CONFIG adds to them.
export APT_CONFIG="$dir/apt/apt.conf"
apt-get -qq update
rm -f "$dir"/debs/*.deb
(cd "$dir/debs" && apt-get -qq download "$@")
for deb in "$dir"/debs/*.deb; do
    dpkg -x "$deb" "$dir/root"
done
rm -rf "$dir/apt" "$dir/debs"
