"""Run and rank identity: launchers and schedulers, run ids, attributes of the OpenTelemetry resource; control groups."""

from __future__ import annotations

import hashlib
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

from otel_train.config.settings import ENVIRONMENT, Config
from otel_train.config.validation import IgnoredSetting
from otel_train.errors import imported
from otel_train.fast_classes import FastNamedTuple, fast_dataclass

# --- launchers --------------------------------------------------------------------------------------
# A malformed number counts as not set, without a warning: the launcher sets these variables, not the user.


class Launcher(FastNamedTuple):
    """Environment variables of one kind of launcher; "" for those it does not set."""

    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...]


LOOPBACK: Final = ("", "localhost", "127.0.0.1", "::1")

LAUNCHERS: Final = (
    # torchrun, and launchers that set the same variables: Ray Train, Kubeflow, accelerate, DeepSpeed.
    Launcher("RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK")),
    # Before Slurm: what mpirun starts inside an allocation inherits the SLURM_* of its daemon.
    *(
        Launcher(f"{mpi}_RANK", (f"{mpi}_SIZE",), f"{mpi}_LOCAL_RANK", (f"{mpi}_LOCAL_SIZE",), ())
        for mpi in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    ),
    Launcher("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), ()),
    Launcher(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        ("SLURM_NODEID",),
    ),
    # An Indexed Job of Kubernetes numbers its pods, and does not say how many there are.
    Launcher("JOB_COMPLETION_INDEX", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), ("NODE_RANK",)),
)
"""In order of precedence: the first one whose variables give a rank is used for all values."""


class RankPlace(FastNamedTuple):
    """Rank, world size and node of a process; the fields are those of ``RunInfo``."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


def rank_place(environ: Mapping[str, str], live: tuple[int, int] | None = None) -> RankPlace:
    """Returns rank, world size and node of a process with this environment; rank and world size from ``live`` if given."""
    launcher = next((each for each in LAUNCHERS if _gives_rank(each, environ)), LAUNCHERS[0])
    rank = _number(environ, launcher.rank) or 0
    world_size = max(_first_number(environ, *launcher.world_size) or 1, rank + 1)
    if live is not None:
        rank, world_size = live
    # Without a number of ranks per host all ranks are assumed to be on one host; in pods, one rank per pod.
    default = 1 if _is_pod_of_many(environ) else world_size
    local_world_size = min(_first_number(environ, *launcher.local_world_size) or default, world_size)
    local_rank = _number(environ, launcher.local_rank)
    node_rank = _first_number(environ, *launcher.node_rank)
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
    )


def ray_environment(modules: Mapping[str, Any]) -> dict[str, str]:
    """Returns the rank and sizes of a Ray Train worker, under torchrun's names; empty elsewhere. Imports nothing.

    Workers with the torch backend have the same values in their environment; workers with other backends do not.
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


def given_run_id(environ: Mapping[str, str]) -> str:
    """Returns the id that a launcher, a scheduler or a tracker gave this run, else "". It may be unique only in its cluster."""
    return (
        environ.get("WANDB_RUN_ID")
        or rendezvous_of(environ)
        or slurm_job(environ)
        or environ.get("RAY_JOB_ID")
        or ""
    )


def rendezvous_of(environ: Mapping[str, str]) -> str:
    """Returns ``--rdzv-id`` of torchrun, any text that its caller chose; "" if unset, for which torchrun's default is "none"."""
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    return elastic if elastic != "none" else ""


def slurm_job(environ: Mapping[str, str]) -> str:
    """Returns the id of the Slurm job, with ``_`` and the number of its task if it is an array; unique on its cluster."""
    job, task = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{job}_{task}" if job and task else job


def torchrun_start(environ: Mapping[str, str]) -> str:
    """Returns a unique id of this start of torchrun on this host, which restarts of its workers keep; "" without torchrun.

    It is the folder with a random name that torchrun makes for the error files of its workers.
    """
    file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    folder = re.fullmatch("(.+)/attempt_[0-9]+/[0-9]+/error[.]json", file)
    return folder[1] if folder else ""


def restarts(environ: Mapping[str, str]) -> int:
    """Returns the number of restarts that torchrun and Slurm have counted."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(_number(environ, name) or 0 for name in counts)


def _gives_rank(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    rank = _number(environ, launcher.rank)
    # In a batch script SLURM_PROCID is 0 and SLURM_NTASKS may be more than 1, but only a job step (srun) starts the tasks.
    in_step = (
        launcher.rank != "SLURM_PROCID" or "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    )
    # The pods of an Indexed Job may also be independent trials: they are ranks only if WORLD_SIZE is set.
    in_job = launcher.rank != "JOB_COMPLETION_INDEX" or _number(environ, "WORLD_SIZE") is not None
    return rank is not None and (rank > 0 or in_step) and in_job


def _is_pod_of_many(environ: Mapping[str, str]) -> bool:
    """Returns whether this is one of several pods with one rank each, as Kubeflow and Indexed Jobs start them."""
    has_remote_master = environ.get("MASTER_ADDR", "") not in LOOPBACK
    return "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ and has_remote_master


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    # Slurm writes "4(x2)" for four tasks on each of two hosts.
    found = re.match(r"\s*(\d{1,18})(?:\(x\d+\).*|,.*)?\s*$", text) if text else None
    return int(found[1]) if found else None


def _first_number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((number for name in names if (number := _number(environ, name)) is not None), None)


# --- identity ---------------------------------------------------------------------------------------

VERSION: Final = "0.1.0"

RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"

INSTANCE_NAMESPACE: Final = "4d63009a-8d0f-11ee-aad7-4c796ed8e320"
"""Source: OpenTelemetry semantic conventions, ``service.instance.id``, namespace for UUID version 5."""

LAUNCH_RUN: Final = "OTEL_TRAIN_LAUNCH_RUN"
"""Variable in which ``otel-train run`` passes a run id to its processes, used if no setting or launcher gives one."""

_MOST_NAMESPACE: Final = 253  # characters that are read

_ENDED_STATES = ("Z", "X")
"""States in ``/proc/<pid>/stat`` of a process that has ended: zombie, dead."""

SLURM_ATTRIBUTES: Final = {
    "slurm.job.id": "SLURM_JOB_ID",
    "slurm.job.name": "SLURM_JOB_NAME",
    "slurm.partition": "SLURM_JOB_PARTITION",
    "slurm.cluster.name": "SLURM_CLUSTER_NAME",
}


@fast_dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Identity of this process.

    Attributes:
        run_id: the same on all ranks and after restarts.
        run_name: display name; the run id if none is set.
        attempt: number of this start of the run, from 0.
        rank: number among all processes of the run, from 0.
        local_rank: number among those on this host, from 0.
        node_rank: number of the host, from 0.
        world_size: processes of the run.
        local_world_size: processes of the run on this host.
        host: ``host.name`` of ``OTEL_RESOURCE_ATTRIBUTES``, else the host name.
        pid: process id.
        instance_id: UUID version 5 of run id and rank; stable over restarts.
        started_unix_ns: when this identity was detected.
        dp_leader: counts samples for its model replica: the first of the ranks that share one by tensor,
            context or pipeline parallelism.
        replica_ranks: how many ranks share a model replica.
        training: number of this training in the run, from 1: a program may train several times.
    """

    run_id: str
    run_name: str
    attempt: int
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    host: str
    pid: int
    instance_id: str
    started_unix_ns: int
    dp_leader: bool = True
    replica_ranks: int = 1
    training: int = 1

    @property
    def ids_of(self) -> str:
        """Seed of trace and span ids; different in each training of a run, which repeat step numbers."""
        return self.run_id if self.training == 1 else f"{self.run_id}/{self.training}"

    def placed(self, run_id: str, training: int, attempt: int) -> RunInfo:
        """Returns this identity with the run id, training and attempt that the run directory gives it."""
        return replace(
            self, run_id=run_id, training=training, attempt=attempt,
            run_name=run_id if self.run_name == self.run_id else self.run_name,
            instance_id=instance_id(run_id, self.rank),
        )  # fmt: skip


def live_ranks(modules: Mapping[str, Any] = sys.modules) -> tuple[int, int] | None:
    """Returns the rank and world size of ``torch.distributed``, if it is loaded and initialised. Imports nothing."""
    distributed = imported("torch.distributed", modules)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def find_job(modules: Mapping[str, Any] = sys.modules) -> tuple[int, int] | None:
    """Returns the same as ``live_ranks``, but None for a single rank."""
    ranks = live_ranks(modules)
    return ranks if ranks is not None and ranks[1] > 1 else None


SHARED_BY: Final = {"tp": "tp", "tensor": "tp", "cp": "cp", "context": "cp", "pp": "pp", "pipeline": "pp"}
"""Kind of parallelism, by words in the name of a process group whose ranks process the same samples."""

NOT_SHARED_BY: Final = frozenset({"dp", "data", "expert", "ep"})
"""Words in the name of a process group in which ranks process different samples."""


def leads_replica() -> bool:
    """Returns whether this is the first rank of its model replica, judged by the existing process groups. Imports nothing.

    A ``DeviceMesh`` names its groups ``mesh_tp`` and so on, Megatron ``TENSOR_MODEL_PARALLEL_GROUP``.
    """
    return all(place == 0 for _, place, _ in _in_replica())


def shares_replica() -> bool:
    """Returns whether other ranks share the model replica, judged by the existing process groups. Imports nothing."""
    return any(size > 1 for _, _, size in _in_replica())


def ranks_of_replica() -> int:
    """Returns how many ranks share the model replica, judged by the existing process groups. Imports nothing."""
    # Megatron also has groups of two kinds at once, such as TENSOR_AND_CONTEXT_PARALLEL_GROUP.
    return math.prod({kinds: size for kinds, _, size in _in_replica() if len(kinds) == 1}.values())


def _in_replica() -> list[tuple[frozenset[str], int, int]]:
    """Returns kinds, group rank of this process and group size of each process group whose ranks share a model replica."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    groups = getattr(getattr(c10d, "_world", None), "pg_group_ranks", None) or {}
    ranks = live_ranks()
    if ranks is None:
        return []
    found = []
    for group, members in list(groups.items()):
        name = str(getattr(group, "group_desc", "")).lower()
        words = set(name.replace("-", "_").split("_"))
        kinds = frozenset(SHARED_BY[word] for word in words & SHARED_BY.keys())
        if kinds and not words & NOT_SHARED_BY and ranks[0] in members:
            found.append((kinds, members[ranks[0]], len(members)))
    return found


def parent_mark() -> str:
    """Returns the unique id of the parent process on this host; its children have it in common."""
    parent = os.getppid()
    return process_mark(parent) or str(parent)


def process_mark(pid: int) -> str:
    """Returns an id of a process on this host that no later process with the same pid has; "" if the process has ended."""
    try:
        # Start time in ticks since boot, and boot id: setting the system clock does not change them.
        stat = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return "" if stat[0] in _ENDED_STATES else f"{boot}/{pid}/{stat[19]}"
    except (OSError, IndexError):
        import psutil

        try:
            return f"{psutil.boot_time():.0f}/{pid}/{psutil.Process(pid).create_time():.0f}"
        except (psutil.Error, OSError, RuntimeError):  # the latter two: there is no /proc
            return ""


def namespace_of(kind: str) -> str:
    """Returns the Linux namespace of this kind, such as ``pid:[4026531836]``, of this process; "" where it is not known."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115 - it is no path
    except OSError:
        return ""


_POD_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def pod_namespace(path: str) -> str:
    """Returns the namespace of this pod from the file that Kubernetes mounts with the service account token; else ""."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_NAMESPACE).strip()
    except OSError:
        return ""


@fast_dataclass(frozen=True, kw_only=True)
class Process:
    """Sources of identity other than the environment. Tests pass fakes."""

    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    now_unix_ns: int = field(default_factory=time.time_ns)
    parent: Callable[[], str] = parent_mark
    live_ranks: Callable[[], tuple[int, int] | None] = live_ranks
    namespace: Callable[[], str] = lambda: pod_namespace(_POD_NAMESPACE)
    user: int = field(default_factory=os.getuid)
    ray: Callable[[], Mapping[str, str]] = lambda: ray_environment(sys.modules)
    entropy: Callable[[int], bytes] = os.urandom
    start: Callable[[Mapping[str, str]], str] = lambda _: ""
    """Returns an id that ranks on several hosts agree on at each start; see ``distributed.store.start_of_job``."""


def detect(
    config: Config, environ: Mapping[str, str] | None = None, *, process: Process | None = None
) -> RunInfo:
    """Detects the identity of this process from its environment; ranks on several hosts also call ``process.start``.

    The run id is the first that exists of: the setting ``run_id``; ``WANDB_RUN_ID``; the scheduler's job, which is
    ``SLURM_JOB_ID`` (with ``SLURM_ARRAY_TASK_ID``) and its cluster, ``RAY_JOB_ID``, or ``k8s.job.uid`` in
    ``OTEL_RESOURCE_ATTRIBUTES``, with ``TORCHELASTIC_RUN_ID`` (unless ``none``) appended; ``TORCHELASTIC_RUN_ID`` alone. A hash
    of cluster, namespace and account is appended to ids that are unique only within them; the hash for a rendezvous includes
    the start of the launcher, if known. Otherwise ranks of one host derive an id from their common launcher, ranks on several
    hosts from the id that they agree on at each start, else from their master's address; a single process generates one from
    the time and random bytes.
    """
    process = process or Process()
    environ = os.environ if environ is None else environ
    environ = {**process.ray(), **environ} if "RANK" not in environ else environ
    place = rank_place(environ, process.live_ranks())
    resource = resource_environment(environ)
    scope = _scope(environ, resource, process)
    given = (
        config.run_id
        or environ.get("WANDB_RUN_ID")
        or _job_id(environ, resource, place, process=process, scope=scope)
    )
    run_id = encodable(given or _made_run_id(environ, place, process, scope))
    return RunInfo(
        run_id=run_id,
        run_name=encodable(config.run_name) or run_id,
        attempt=config.attempt if config.attempt >= 0 else restarts(environ),
        **place._asdict(),
        # In a container the name of the host can only come from the environment.
        host=encodable(resource.get("host.name", process.host)),
        pid=process.pid,
        instance_id=instance_id(run_id, place.rank),
        started_unix_ns=process.now_unix_ns,
        dp_leader=_leads(config, place),
        replica_ranks=_replica_ranks(config),
    )


def encodable(text: str) -> str:
    """Returns the text with surrogates, which stand for bytes of a file name that are no UTF-8, as escapes: exporters need UTF-8."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _replica_ranks(config: Config) -> int:
    given = config.tensor_parallel * config.pipeline_parallel
    return given if given > 1 else ranks_of_replica()


def _leads(config: Config, place: RankPlace) -> bool:
    if config.tensor_parallel * config.pipeline_parallel == 1:
        return leads_replica()
    first_stage = place.rank < place.world_size // config.pipeline_parallel
    return first_stage and place.rank % config.tensor_parallel == 0


def instance_id(run_id: str, rank: int) -> str:
    """Returns ``service.instance.id`` of a rank: a UUID version 5, the same after a restart."""
    import uuid

    return str(uuid.uuid5(uuid.UUID(INSTANCE_NAMESPACE), f"{run_id}/{rank}"))


def resource_attributes(
    info: RunInfo, environ: Mapping[str, str], *, modules: Mapping[str, Any]
) -> dict[str, str | int]:
    """Returns the attributes of the OpenTelemetry resource, which identify the sender.

    They include ``OTEL_RESOURCE_ATTRIBUTES``, which cannot override the attributes that identify the process.
    """
    given = resource_environment(environ)
    attributes: dict[str, str | int] = dict(given)
    for name, variable in SLURM_ATTRIBUTES.items():
        if environ.get(variable):
            attributes[name] = environ[variable]
    attributes |= {
        "service.name": environ.get("OTEL_SERVICE_NAME") or given.get("service.name") or "otel-train",
        "service.instance.id": info.instance_id,
        "host.name": info.host,
        "process.pid": info.pid,
        "process.runtime.name": sys.implementation.name,
        "process.runtime.version": ".".join(map(str, sys.version_info[:3])),
        "telemetry.distro.name": "otel-train",
        "telemetry.distro.version": VERSION,
        "train.run.id": info.run_id,
        "train.run.name": info.run_name,
        "train.run.attempt": info.attempt,
        "train.rank": info.rank,
        "train.local_rank": info.local_rank,
        "train.node_rank": info.node_rank,
        "train.world.size": info.world_size,
    }
    return attributes | torch_versions(modules)


ABOUT: Final = (
    ("train.run.name",),
    ("train.team", "team", "service.namespace"),
    ("train.owner", "owner"),
    ("slurm.job.id", "k8s.job.name", "train.job"),
    ("k8s.cluster.name", "slurm.cluster.name", "train.cluster"),
    ("k8s.namespace.name", "slurm.partition", "train.namespace"),
)
"""Resource attributes for each label of ``train.run.info``; the first non-empty one is its value."""


def about_run(resource: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the values of the labels of ``train.run.info``: owner and place of the run."""
    return tuple(next((str(resource[name]) for name in names if resource.get(name)), "") for names in ABOUT)


def resource_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``OTEL_RESOURCE_ATTRIBUTES`` as a mapping, percent-decoded; empty if it is malformed.

    Source: OpenTelemetry specification, resource SDK: on any error the whole value is discarded, and
    the error reported.
    """
    if wrong_resource(environ):
        return {}
    pairs = [item.split("=", 1) for item in environ.get(RESOURCE, "").split(",") if item.strip()]
    return {unquote(name.strip()): unquote(value.strip()) for name, value in pairs}


def wrong_resource(environ: Mapping[str, str]) -> list[IgnoredSetting]:
    """Returns the error in ``OTEL_RESOURCE_ATTRIBUTES``; empty if there is none."""
    for item in environ.get(RESOURCE, "").split(","):
        name, equals, _ = item.partition("=")
        if item.strip() and not (equals and name.strip()):
            rule = "expected name=value, several divided by commas. Correct or unset the variable"
            return [IgnoredSetting(RESOURCE, ENVIRONMENT, f"{RESOURCE}: {item[:200]!r}: {rule}")]
    return []


def run_id_of_start(unix_ns: int, entropy: bytes) -> str:
    """Returns the id of an unnamed run: start time in UTC, and a unique suffix."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(unix_ns / 1e9))}-{entropy.hex()}"


def _scope(environ: Mapping[str, str], resource: Mapping[str, str], process: Process) -> tuple[str, str, str]:
    """Returns the scope in which ids of a site are unique: cluster, namespace, account. The same on all ranks of a job."""
    cluster = resource.get("k8s.cluster.name") or environ.get("SLURM_CLUSTER_NAME") or ""
    namespace = resource.get("k8s.namespace.name") or environ.get("POD_NAMESPACE") or ""
    if not namespace and "KUBERNETES_SERVICE_HOST" in environ:
        namespace = process.namespace()
    return cluster, namespace, str(process.user)


def _job_id(
    environ: Mapping[str, str],
    resource: Mapping[str, str],
    place: RankPlace,
    *,
    process: Process,
    scope: tuple[str, str, str],
) -> str:
    """Returns the run id from the scheduler's job and torchrun's rendezvous; "" without both."""
    rendezvous, slurm, uid = rendezvous_of(environ), slurm_job(environ), resource.get("k8s.job.uid", "")
    job = slurm and "-".join(filter(None, (environ.get("SLURM_CLUSTER_NAME"), slurm)))
    if not job and environ.get("RAY_JOB_ID"):  # each Ray cluster counts its jobs
        job = (
            f"{environ['RAY_JOB_ID']}-{_hash(uid or '/'.join((*scope, environ.get('RAY_CLUSTER_NAME', ''))))}"
        )
    job = job or uid
    if job or not rendezvous:
        # A job may run several torchruns at the same time.
        return f"{job}-{rendezvous}" if rendezvous and rendezvous not in (slurm, uid) else job
    return f"{rendezvous}-{_hash('/'.join((*scope, _start(environ, place, process))))}"


def _start(environ: Mapping[str, str], place: RankPlace, process: Process) -> str:
    """Returns an id that only the ranks of this start have; "" if ranks on several hosts cannot agree on one."""
    # In a pod a restarted container continues the run: the host name, which is the pod's, stays the same.
    in_pod = "KUBERNETES_SERVICE_HOST" in environ
    if place.local_world_size < place.world_size:
        return "" if in_pod else process.start(environ)
    if in_pod:
        return process.host
    return f"{process.host}/{environ.get(LAUNCH_RUN) or torchrun_start(environ) or process.parent()}"


def _made_run_id(
    environ: Mapping[str, str], place: RankPlace, process: Process, scope: tuple[str, str, str]
) -> str:
    master, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if place.local_world_size < place.world_size:
        start = _start(environ, place, process)
        if start:  # without the world size: an elastic job may continue with more or fewer ranks
            return "run-" + _hash("/".join((*scope, start)))
        if master not in LOOPBACK:
            return "run-" + _hash("/".join((*scope, master, port, str(place.world_size))))
    # On one host all processes below one ``otel-train run`` are one run.
    if environ.get(LAUNCH_RUN):
        return environ[LAUNCH_RUN]
    if place.world_size == 1:
        return run_id_of_start(process.now_unix_ns, process.entropy(3))
    return "run-" + _hash(f"{process.host}/{torchrun_start(environ) or process.parent()}/{port}")


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()


def torch_versions(modules: Mapping[str, Any] = sys.modules) -> dict[str, str | int]:
    """Returns the resource attributes of torch, if it is loaded. Imports nothing."""
    torch = imported("torch", modules)
    if torch is None:
        return {}
    cuda = {"train.cuda.version": str(torch.version.cuda)} if torch.version.cuda else {}
    return {"train.torch.version": str(torch.__version__), **cuda}


# --- control groups ---------------------------------------------------------------------------------

GROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")


class MemoryGroup(FastNamedTuple):
    """The control group of a process in one hierarchy.

    Attributes:
        version: version of control groups: 1 or 2.
        mount: folder in which the hierarchy is mounted.
        path: path of the group below it.
    """

    version: int
    mount: Path
    path: PurePosixPath

    @property
    def folders(self) -> list[Path]:
        """Folders of the group and of all groups around it, the outermost last."""
        return [self.mount / each for each in (self.path, *self.path.parents)]


def memory_groups(pid: int | None = None, groups: Path = GROUPS, proc: Path = _PROC) -> list[MemoryGroup]:
    """Returns the memory groups of a process, of version 2 (cgroup-v2.rst) and version 1 (memory.rst).

    In a container without a cgroup namespace the path is that of the host, but the group is mounted as the root.

    Args:
        pid: process; None for this one.
        groups: folder in which control groups are mounted.
        proc: folder of the processes.
    """
    try:
        text = (proc / str(pid or "self") / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for row in text.splitlines():
        _, controllers, path = row.split(":", 2)
        group = PurePosixPath(path.lstrip("/"))
        if not controllers:
            found += [MemoryGroup(2, mount, group) for mount in (groups, groups / "unified")]
        elif "memory" in controllers.split(","):
            found.append(MemoryGroup(1, groups / "memory", group))
    return found
