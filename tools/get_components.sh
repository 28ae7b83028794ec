#!/usr/bin/env bash
# Put the programs of the stack where the tests and `otel-train stack up --local` look for them.
#
#   tools/get_components.sh [collector|prometheus|alertmanager|jaeger|compose|kustomize]...
#
# Without a name, all of them. They land in $OTEL_TRAIN_TEST_BIN (default: otel-train/stack/bin below the
# user's cache folder), at the versions that .env pins. What is there at its version is left alone, and so is
# what PATH offers at that version. The rest is built from Go modules (Go 1.25 or later; about 25 minutes for
# all on two cores, once); compose, which only checks files, is docker's own or comes from Debian's packages.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=${OTEL_TRAIN_TEST_BIN:-${XDG_CACHE_HOME:-$HOME/.cache}/otel-train/stack/bin}
mkdir -p "$bin/.pins" "$bin/.src"
bin=$(cd "$bin" && pwd)

version_of() { sed -n "s/^$1_VERSION=\([^@]*\).*/\1/p" "$root/.env"; }
COLLECTOR=$(version_of COLLECTOR)
PROMETHEUS=$(version_of PROMETHEUS)
ALERTMANAGER=$(version_of ALERTMANAGER)
JAEGER=$(version_of JAEGER)
# Used to check deploy/kubernetes alone, so they are no settings of the stack.
KUSTOMIZE=v5.7.1
PROMETHEUS_OPERATOR=v0.85.0
TRAINING_OPERATOR=v1.9.3

exec 9>"$bin/.lock"
flock 9 && : # one builder at a time: a second caller waits, then finds everything there

say() { printf '%s %s\n' "$(date +%T)" "$*" >&2; }
die() {
    say "$*"
    exit 1
}

programs_of() {
    case $1 in
        collector) echo otelcol-train ;;
        prometheus) echo prometheus promtool ;;
        alertmanager) echo alertmanager amtool ;;
        jaeger) echo jaeger ;;
        compose) echo docker-compose ;;
        kustomize) echo kustomize ;;
        *) die "$1: not a component. Known: collector prometheus alertmanager jaeger compose kustomize" ;;
    esac
}

# What must be the same for a program in the cache to be kept.
pin_of() {
    case $1 in
        collector) echo "$COLLECTOR $(sha256sum <"$root/tools/components/collector.yaml" | cut -c1-12)" ;;
        prometheus) echo "$PROMETHEUS" ;;
        alertmanager) echo "$ALERTMANAGER" ;;
        jaeger) echo "$JAEGER" ;;
        compose) echo 2 ;;
        kustomize) echo "$KUSTOMIZE $PROMETHEUS_OPERATOR $TRAINING_OPERATOR" ;;
    esac
}

there() {
    local program
    [ "$(cat "$bin/.pins/$1" 2>/dev/null)" = "$(pin_of "$1")" ] || return 1
    for program in $(programs_of "$1"); do
        [ -x "$bin/$program" ] || return 1
    done
}

# A program on PATH counts when it is the pinned version and can what the stack asks of it.
on_path() {
    local program
    for program in $(programs_of "$1"); do
        command -v "$program" >/dev/null || return 1
    done
    case $1 in
        prometheus) prometheus --version 2>&1 | grep -q "version $PROMETHEUS " && prometheus --help 2>&1 | grep -q otlp-receiver ;;
        alertmanager) alertmanager --version 2>&1 | grep -q "version $ALERTMANAGER " ;;
        jaeger) jaeger version 2>&1 | grep -q "v$JAEGER" ;;
        compose) docker-compose version 2>&1 | grep -q " v\?2\." ;;
        *) return 1 ;; # a Collector of another make may lack a component; ask for it by linking it into the cache
    esac
}

need_go() {
    command -v go >/dev/null || die "$1 $2 is not in $bin and Go is not installed. Install Go 1.25 or later" \
        "(the build needs about 4 GB in its module cache), or put $(programs_of "$1") into $bin and" \
        "'$(pin_of "$1")' into $bin/.pins/$1"
}

# Run a command with its output in the log of a component; show the log's end when it fails.
logged() {
    local log=$bin/.src/$1.log
    shift
    "$@" >>"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        die "failed: $* (all of its output: $log)"
    }
}

# An empty folder for the sources of a component.
source_folder() {
    : >"$bin/.src/$1.log"
    chmod -R u+w "$bin/.src/$1" 2>/dev/null || true
    rm -rf "${bin:?}/.src/$1"
    mkdir -p "$bin/.src/$1"
    cd "$bin/.src/$1"
}

# Where Go keeps a module, which is fetched if need be.
folder_of() {
    go mod download -json "$1" | sed -n 's/^.*"Dir": "\(.*\)".*$/\1/p'
}

# The official builder writes the main program; its own download step would also fetch what tests need, so
# the requirements come straight from the manifest.
build_collector() {
    local minor=${COLLECTOR#0.}
    minor=${minor%%.*}
    source_folder collector
    sed -e "s/@VERSION@/$COLLECTOR/" -e "s/@STABLE@/1.$((minor - 94)).0/" \
        "$root/tools/components/collector.yaml" >manifest.yaml
    logged collector env GOBIN="$PWD/tool" go install "go.opentelemetry.io/collector/cmd/builder@v$COLLECTOR"
    logged collector tool/builder --config manifest.yaml --skip-get-modules --skip-compilation
    { echo "module otel-train.invalid/collector" && sed -n 's/^ *- gomod: /require /p' manifest.yaml; } >go.mod
    logged collector go build -mod=mod -trimpath -ldflags "-s -w" -o otelcol-train .
    mv otelcol-train "$bin/"
}

# Prometheus 3.14.0 is module v0.314.0. Without the discovery of clouds it builds in a third of the time.
build_prometheus() {
    local major minor patch version module=github.com/prometheus/prometheus
    IFS=. read -r major minor patch <<<"$PROMETHEUS"
    version=v0.$major$(printf %02d "$minor").$patch
    source_folder prometheus
    logged prometheus go mod init otel-train.invalid/prometheus
    # Prometheus' own go.mod replaces this one too: two modules would offer the same package.
    logged prometheus go mod edit -replace cloud.google.com/go=cloud.google.com/go@v0.123.0
    logged prometheus go get -tool "$module/cmd/prometheus@$version" "$module/cmd/promtool@$version"
    build_from_module prometheus "$module" readonly remove_all_sd "$PROMETHEUS"
}

# The page of Alertmanager is built by npm and not in the module, yet embedded by it: an empty one will do.
build_alertmanager() {
    local module=github.com/prometheus/alertmanager
    source_folder alertmanager
    logged alertmanager go mod init otel-train.invalid/alertmanager
    logged alertmanager go get -tool "$module/cmd/alertmanager@v$ALERTMANAGER" "$module/cmd/amtool@v$ALERTMANAGER"
    logged alertmanager go mod vendor -e
    mkdir -p "vendor/$module/ui/app/dist"
    echo '<!doctype html><title>Alertmanager (API only)</title>' >"vendor/$module/ui/app/dist/index.html"
    build_from_module alertmanager "$module" vendor "" "$ALERTMANAGER"
}

# build_from_module COMPONENT MODULE MODE TAGS VERSION
build_from_module() {
    local program
    for program in $(programs_of "$1"); do
        logged "$1" go build "-mod=$3" -tags "$4" -trimpath \
            -ldflags "-s -w -X github.com/prometheus/common/version.Version=$5" -o "$program" "$2/cmd/$program"
        mv "$program" "$bin/"
    done
}

# Jaeger 2.13 is in module v1.76.0. It is built in a copy of the module, whose go.sum has every checksum.
build_jaeger() {
    local minor unpacked
    minor=$(cut -d. -f2 <<<"$JAEGER")
    source_folder jaeger
    unpacked=$(folder_of "github.com/jaegertracing/jaeger@v1.$((minor + 63)).${JAEGER##*.}")
    cp -r "$unpacked/." . && chmod -R u+w .
    logged jaeger go build -trimpath -o jaeger-built -ldflags "-s -w -X github.com/jaegertracing/jaeger/internal/version.latestVersion=v$JAEGER" ./cmd/jaeger
    mv jaeger-built "$bin/jaeger"
}

# Checking files needs no engine, so any Compose 2 will do.
build_compose() {
    local unpacked=$bin/.src/compose
    if docker compose version >/dev/null 2>&1; then
        printf '#!/bin/sh\nexec docker compose "$@"\n' >"$bin/docker-compose"
        chmod +x "$bin/docker-compose"
        return
    fi
    rm -rf "$unpacked"
    logged compose "$root/tools/debian_packages.sh" "$unpacked" trixie docker-compose
    # Where the package has the program as a plugin of docker's, what is in usr/bin is a link to it.
    mv -f "$unpacked/root/usr/libexec/docker/cli-plugins/docker-compose" "$bin/" 2>/dev/null ||
        mv -f "$unpacked/root/usr/bin/docker-compose" "$bin/"
    rm -rf "$unpacked"
}

# kustomize, and the schemas of the objects that operators add to Kubernetes, from the operators' own modules.
build_kustomize() {
    local operator training
    source_folder kustomize
    logged kustomize env GOBIN="$bin" go install "sigs.k8s.io/kustomize/kustomize/v5@$KUSTOMIZE"
    operator=$(folder_of "github.com/prometheus-operator/prometheus-operator@$PROMETHEUS_OPERATOR")
    training=$(folder_of "github.com/kubeflow/training-operator@$TRAINING_OPERATOR")
    mkdir -p "$bin/crds"
    for kind in podmonitor prometheusrule; do
        cp -f "$operator/example/prometheus-operator-crd/monitoring.coreos.com_${kind}s.yaml" "$bin/crds/$kind.yaml"
    done
    cp -f "$training/manifests/base/crds/kubeflow.org_pytorchjobs.yaml" "$bin/crds/pytorchjob.yaml"
    chmod -R u+w "$bin/crds"
}

[ $# -gt 0 ] || set -- collector prometheus alertmanager jaeger compose kustomize
for name in "$@"; do
    programs=$(programs_of "$name")
    if there "$name"; then
        continue
    fi
    if on_path "$name"; then
        for program in $programs; do ln -sf "$(command -v "$program")" "$bin/$program"; done
    else
        [ "$name" = compose ] || need_go "$name" "$(pin_of "$name")"
        say "$name $(pin_of "$name"): building into $bin (minutes, once)"
        start=$SECONDS
        (build_"$name")
        [ "$name" = compose ] || chmod -R u+w "$bin/.src/$name"
        rm -rf "${bin:?}/.src/$name"
        say "$name: built in $((SECONDS - start)) s"
    fi
    pin_of "$name" >"$bin/.pins/$name"
done
