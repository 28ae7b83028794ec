"""``otel-train stack``: starts, stops and shows the stack."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from otel_train.errors import ConfigError, StackError
from otel_train.stack import configuration
from otel_train.stack.compose import PROFILES, READY_WITHIN_S, Compose
from otel_train.stack.configuration import Ports, write_alertmanager
from otel_train.stack.local import ORDER, LocalStack, last_lines, log_file

DESCRIPTION = """\
Start, stop and show the back end for training runs: OpenTelemetry Collector, Prometheus with rules, Alertmanager, a
trace store, and Grafana with dashboards.

In containers (needs Docker with Compose):

  otel-train stack up                    traces in Tempo; --traces jaeger: in Jaeger
  otel-train stack up --demo             also trains a small model

As plain processes, from programs on this machine, without Grafana. Programs that are not installed are left out and
named:

  otel-train stack up --local            until Ctrl-C; --detach: in the background

Then, in another terminal:

  OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 python train.py

With --secure, trainers need a certificate and a token, which are made at the first start. All ports listen on
loopback. 'down' keeps the data; 'down --data' removes it.
"""
EPILOG = "Exit codes: 0 success, 1 status: a part is not ready, 2 error, 130 Ctrl-C before a detached stack was ready"
PARTLY = 1
LINES = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    up = _add_up(actions)
    down = _add(actions, "down", "stop the stack; keep its data")
    down.add_argument("--data", action="store_true", help="also remove the data")
    status = _add(actions, "status", "show which parts run, and their addresses")
    logs = _add(actions, "logs", "print the logs")
    logs.add_argument("name", nargs="*", metavar="PART", help=f"parts, of {', '.join(ORDER)} (default: all)")
    logs.add_argument("--follow", "-f", action="store_true", help="print new lines until Ctrl-C")
    state = configuration.state_folder()
    for action in (up, down, status, logs):
        folder = "state folder of a local stack (default: %(default)s)"
        action.add_argument("--state", type=Path, default=state, metavar="DIR", help=folder)


def _add(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str
) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")


def _add_up(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    up = _add(actions, "up", "start the stack, wait until it is ready, print the addresses")
    add = up.add_argument
    add("--local", action="store_true", help="as plain processes instead of containers")
    add("--detach", action="store_true", help="with --local: run in the background")
    traces = "trace store (default: the variable TRACES, else tempo; with --local: jaeger)"
    add("--traces", choices=["tempo", "jaeger"], help=traces)
    add("--demo", action="store_true", help="in containers: also train a small model")
    add("--gpu", action="store_true", help="in containers: also run NVIDIA's DCGM exporter")
    add("--secure", action="store_true", help="accept OTLP only over TLS and with a token")
    add("--webhook", default="", metavar="URL", help="URL to which Alertmanager sends alerts")
    scrape = "with --local: also scrape this /metrics address; may be repeated"
    add("--scrape", action="append", default=[], metavar="HOST:PORT", help=scrape)
    port = "with --local: another port for a service, such as otlp_http=14318; may be repeated"
    add("--port", action="append", default=[], metavar="NAME=N", help=port)
    return up


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    if args.action == "up":
        return _up_local(args) if args.local else _up_compose(args)
    local = LocalStack.of(args.state)
    if args.action == "down":
        return _down(args, local)
    if args.action == "status":
        return _status(args, local)
    return _logs(args, local)


def _up_local(args: argparse.Namespace) -> int:
    if args.traces == "tempo" or args.demo or args.gpu:
        raise ConfigError(
            "--local runs Jaeger, without demo and DCGM exporter: leave out --traces tempo, --demo and --gpu. "
            "`otel-train demo` trains beside it"
        )
    stack = LocalStack(args.state, Ports.of(configuration.settings()).changed(args.port), secure=args.secure)
    stack.configure(webhook=args.webhook, scrape=args.scrape)
    # SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does: the processes of the stack are stopped first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, signal.default_int_handler)
    left = False
    try:
        _say(f"Starting (state and logs: {args.state})")
        stack.start(say=_say)
        _show({name: f"missing: {what}" for name, what in stack.without().items()})
        _show(stack.addresses())
        left = args.detach
        if left:
            _say("Stop it with: otel-train stack down")
            return 0
        _say("Ctrl-C stops it.")
        if ended := stack.watch():
            log = log_file(args.state, ended)
            raise StackError(f"{ended} ended unexpectedly, so the rest was stopped too. Its log is {log}")
    except KeyboardInterrupt:
        _say("\nStopping.")
        if args.detach:  # the exit code must not tell the caller that the stack runs in the background
            raise
    finally:
        if not left:
            _stop_undisturbed(stack)
    return 0


def _stop_undisturbed(stack: LocalStack) -> None:
    """Stops the stack with signals ignored: a second Ctrl-C must not leave some of its processes running."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _show(dict.fromkeys(stack.stop(), "stopped"))
    stack.forget()


def _up_compose(args: argparse.Namespace) -> int:
    if args.detach or args.scrape or args.port:
        raise ConfigError(
            "--detach, --scrape and --port belong to --local. Containers are in the background anyway; their ports "
            "are set by the variables in .env, such as OTLP_HTTP_PORT=14318 otel-train stack up"
        )
    if args.secure and args.demo:
        raise ConfigError(
            "--secure and --demo: the model in the container has no token. Start one beside it with its variables "
            "set: otel-train demo"
        )
    overrides = {"TRACES": args.traces} if args.traces else {}
    if args.webhook:
        config = args.state / "compose" / "alertmanager.yml"
        write_alertmanager(config, args.webhook)
        overrides["ALERTMANAGER_CONFIG"] = str(config.resolve())
    compose = Compose(overrides, secure=args.state if args.secure else None)
    compose.up([profile for profile in PROFILES if getattr(args, profile)])
    _say("Waiting until all parts are ready.")
    configuration.wait(compose.health_urls(), timeout_s=READY_WITHIN_S, say=_say)
    _show(compose.addresses())
    return 0


def _down(args: argparse.Namespace, local: LocalStack | None) -> int:
    kept = args.state / "data"
    if local is None and args.data and kept.is_dir():
        local = LocalStack(args.state, Ports())  # it was stopped before; its data is still there
    if local is None:
        _compose(args).down(data=args.data)
        return 0
    # stack.json is removed first: without it, `stack up`, which watches the processes, takes their end for intended.
    local.forget()
    _show(dict.fromkeys(local.stop(), "stopped"))
    local.forget(data=args.data)
    if args.data:
        _say(f"  data of {args.state} removed")
    return 0


def _compose(args: argparse.Namespace) -> Compose:
    try:
        return Compose({})
    except StackError as error:
        raise StackError(f"no local stack in {args.state}, and none in containers: {error}") from error


def _status(args: argparse.Namespace, local: LocalStack | None) -> int:
    stack = local or _compose(args)
    if isinstance(stack, Compose):
        stack.status()
    states = stack.states()
    _show(states)
    _show(stack.addresses())
    return 0 if set(states.values()) == {"ready"} else PARTLY


def _logs(args: argparse.Namespace, local: LocalStack | None) -> int:
    if local is None:
        _compose(args).logs(args.name, follow=args.follow)
        return 0
    unknown = sorted(set(args.name) - set(ORDER))
    if unknown:
        raise ConfigError(f"{unknown[0]}: expected a part of the stack: {', '.join(ORDER)}")
    paths = {name: log_file(local.state, name) for name in args.name or ORDER}
    for name, path in paths.items():
        for line in last_lines(path, LINES):
            print(f"{name:<12} | {line}")
    if args.follow:
        _follow(paths)
    return 0


def _follow(paths: Mapping[str, Path]) -> NoReturn:
    existing = {name: path for name, path in paths.items() if path.exists()}
    files_open = {name: path.open(encoding="utf-8", errors="replace") for name, path in existing.items()}
    for file in files_open.values():
        file.seek(0, os.SEEK_END)
    while True:
        for name, file in files_open.items():
            for line in file:
                print(f"{name:<12} | {line}", end="", flush=True)
        time.sleep(0.5)


def _show(addresses: Mapping[str, str]) -> None:
    for what, where in addresses.items():
        _say(f"  {what:<14} {where}")


_say = partial(print, flush=True)
