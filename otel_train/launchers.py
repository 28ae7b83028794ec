"""What launchers and schedulers tell a process about its place in a run.

A malformed number counts as not set: these variables are not the user's settings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Launcher(NamedTuple):
    """The variables in which one kind of launcher tells a process its place. "" where it has none."""

    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...]


LOOPBACK: Final = ("", "localhost", "127.0.0.1", "::1")

LAUNCHERS: Final = (
    # torchrun, and those who speak like it: Ray Train, Kubeflow, accelerate, DeepSpeed.
    Launcher("RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK")),
    # Before Slurm: what mpirun starts inside an allocation inherits the SLURM_* of its daemon.
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        (),
    ),
    Launcher(
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        "MV2_COMM_WORLD_LOCAL_RANK",
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        (),
    ),
    Launcher("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), ()),
    Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        ("SLURM_NODEID",),
    ),
    # An Indexed Job of Kubernetes numbers its pods, and tells nobody how many there are.
    Launcher("JOB_COMPLETION_INDEX", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), ("NODE_RANK",)),
)
"""In the order in which they are believed; the first that gives a rank gives everything."""


class Place(NamedTuple):
    """Where a process stands among its peers; the fields are those of ``RunInfo``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def place_of(environ: Mapping[str, str], live: tuple[int, int] | None = None) -> Place:
    """Where a process with this environment stands.

    Args:
        environ: of the process.
        live: rank and world size, from somebody who knows better than the environment.
    """
    launcher = next((each for each in LAUNCHERS if _speaks(each, environ)), LAUNCHERS[0])
    rank = _number(environ, launcher.rank) or 0
    world_size = max(_first_number(environ, *launcher.world_size) or 1, rank + 1)
    if live is not None:
        rank, world_size = live
    # Nobody says how many share the host: then we take it that all do, but for pods, which are one each.
    unsaid = 1 if _is_pod_of_many(environ) else world_size
    local_world_size = min(_first_number(environ, *launcher.local_world_size) or unsaid, world_size)
    local_rank = _number(environ, launcher.local_rank)
    node_rank = _first_number(environ, *launcher.node_rank)
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
    )


def ray_environment(modules: Mapping[str, Any]) -> dict[str, str]:
    """What a worker of Ray Train is told of its place, in torchrun's words; empty elsewhere. Imports nothing.

    Workers with the torch backend have the same in their environment; others do not.
    """
    train = modules.get("ray.train")
    if train is None:
        return {}
    try:
        context = train.get_context()
        ranks = {
            "RANK": context.get_world_rank(),
            "WORLD_SIZE": context.get_world_size(),
            "LOCAL_RANK": context.get_local_rank(),
            "LOCAL_WORLD_SIZE": context.get_local_world_size(),
            "NODE_RANK": context.get_node_rank(),
        }
    except (AttributeError, RuntimeError, TypeError, ValueError):  # outside a worker
        return {}
    return {name: str(number) for name, number in ranks.items() if isinstance(number, int)}


_ATTEMPT: Final = re.compile("(.+)/attempt_[0-9]+/[0-9]+/error[.]json")


def given_run_id(environ: Mapping[str, str]) -> str:
    """The id that a launcher, a scheduler or a tracker has given this run; "" if none has. Not unique by itself."""
    return (
        environ.get("WANDB_RUN_ID")
        or rendezvous_of(environ)
        or slurm_job(environ)
        or environ.get("RAY_JOB_ID")
        or ""
    )


def rendezvous_of(environ: Mapping[str, str]) -> str:
    """The id of torchrun's rendezvous, which whoever calls it makes up; its own default is the word "none"."""
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    return elastic if elastic != "none" else ""


def slurm_job(environ: Mapping[str, str]) -> str:
    """The number of a Slurm job, and of its task in an array; unique on its cluster."""
    names = ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID")
    return (
        "_".join(environ[name] for name in names if environ.get(name)) if environ.get("SLURM_JOB_ID") else ""
    )


def torchrun_start(environ: Mapping[str, str]) -> str:
    """What tells this start of torchrun on this host from every other, also where it restarts its workers; "" elsewhere.

    It is the folder with a random name that torchrun makes for what workers leave behind.
    """
    folder = _ATTEMPT.fullmatch(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return folder[1] if folder else ""


def restarts(environ: Mapping[str, str]) -> int:
    """How often the run has been started again, as far as the launcher and the scheduler count."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(_number(environ, name) or 0 for name in counts)


def _speaks(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    rank = _number(environ, launcher.rank)
    # Slurm calls a batch script task 0 of many, though it is alone; only in a step is it one of them.
    in_step = (
        launcher.rank != "SLURM_PROCID" or "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    )
    # Independent trials are pods of an Indexed Job as well: only who says how many there are makes them ranks.
    in_job = launcher.rank != "JOB_COMPLETION_INDEX" or _number(environ, "WORLD_SIZE") is not None
    return rank is not None and (rank > 0 or in_step) and in_job


def _is_pod_of_many(environ: Mapping[str, str]) -> bool:
    """Whether this is one pod of a job over several, each with one rank, as Kubeflow and Indexed Jobs start them."""
    elsewhere = environ.get("MASTER_ADDR", "") not in LOOPBACK
    return "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ and elsewhere


def _number(environ: Mapping[str, str], name: str) -> int | None:
    # Slurm writes "4(x2)" for four tasks on each of two hosts.
    found = re.match(r"\s*(\d+)(?:\(x\d+\).*|,.*)?\s*$", environ.get(name, ""))
    return int(found[1]) if found else None


def _first_number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((number for name in names if (number := _number(environ, name)) is not None), None)
