"""Who runs where: run ids, ranks, resource attributes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from otel_train import __version__
from otel_train.config import Config
from otel_train.resource import (
    Process,
    RunInfo,
    about_run,
    detect,
    instance_id,
    live_ranks,
    parent_mark,
    pod_namespace,
    rank_place,
    ray_environment,
    resource_attributes,
    resource_environment,
    wrong_resource,
)
from tests.support.zero_code import printed_by

ALONE = Process(
    pid=7, host="node-a", now_unix_ns=1_700_000_000_000_000_000, parent=lambda: "boot/1/2", namespace=lambda: "", user=1000,
    live_ranks=lambda: None, entropy=lambda size: bytes(range(size)),
)  # fmt: skip


def found(
    environ: Mapping[str, str], *, config: Config | None = None, process: Process = ALONE, **where: Any
) -> RunInfo:
    """What a process finds out; ``where``: in what it differs from the usual one."""
    return detect(config or Config(), environ, process=replace(process, **where))


def test_variables_that_are_no_numbers_and_no_text_stop_nothing() -> None:
    """Python reads no number of more than 4,300 digits; bytes that are no UTF-8 cannot be sent."""
    odd = {"WANDB_RUN_ID": "\udcff", "OTEL_RESOURCE_ATTRIBUTES": "host.name=\udcfe"}
    info = found({"RANK": "9" * 5000, "WORLD_SIZE": "2", **odd})

    assert info.rank == 0
    assert f"{info.run_id}{info.run_name}{info.host}".encode()


def test_a_process_alone_is_rank_0_of_1_and_gets_a_readable_id() -> None:
    """The name of the folder is recognised a week later."""
    info = found({})

    assert info.run_id == info.run_name == "20231114-221320-000102"
    place = info.rank, info.world_size, info.local_rank, info.local_world_size, info.node_rank
    assert place == (0, 1, 0, 1, 0)
    assert (info.attempt, info.host, info.pid, info.dp_leader) == (0, "node-a", 7, True)
    assert info.started_unix_ns == 1_700_000_000_000_000_000


def test_two_processes_alone_get_two_ids_and_making_one_leaves_the_seeds_alone() -> None:
    """Two runs started in the same second share no directory; a seeded ``random`` goes on as if we had never been there."""
    process, state = Process(live_ranks=lambda: None), random.getstate()

    assert found({}, process=process).run_id != found({}, process=process).run_id
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        ({"WANDB_RUN_ID": "w", "TORCHELASTIC_RUN_ID": "t"}, "w"),
        ({"TORCHELASTIC_RUN_ID": "t", "SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "a"}, "a-8-t"),
        ({"TORCHELASTIC_RUN_ID": "8", "SLURM_JOB_ID": "8", "SLURM_CLUSTER_NAME": "a"}, "a-8"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "8"}, "8"),
        ({"SLURM_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3", "RAY_JOB_ID": "r"}, "8_3"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,k8s.job.uid=k"}, "k"),
        ({"TORCHELASTIC_RUN_ID": "t", "OTEL_RESOURCE_ATTRIBUTES": "k8s.job.uid=k"}, "k-t"),
    ],
)
def test_the_run_id_comes_from_whoever_started_the_run(environ: dict[str, str], run_id: str) -> None:
    """All ranks and all restarts get the same variables, so they agree without talking. What the user says wins."""
    assert found(environ).run_id == run_id
    assert found(environ, config=Config(run_id="mine")).run_id == "mine"


ON_TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "101"}


def error_file(folder: str, attempt: int, rank: int) -> str:
    return f"/tmp/torchelastic_x/{folder}/attempt_{attempt}/{rank}/error.json"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        tuple({"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": name} for name in ("berlin", "paris")),
        tuple({"RAY_JOB_ID": "01000000", "RAY_CLUSTER_NAME": name} for name in ("a", "b")),
        tuple({"RAY_JOB_ID": "01000000", "OTEL_RESOURCE_ATTRIBUTES": f"k8s.job.uid={uid}"} for uid in "ab"),
        tuple({**TORCHRUN, **ON_TWO_HOSTS, "POD_NAMESPACE": name} for name in ("speech", "vision")),
        tuple({**ON_TWO_HOSTS, "OTEL_RESOURCE_ATTRIBUTES": f"k8s.namespace.name={name}"} for name in "ab"),
        tuple({**ON_TWO_HOSTS, "OTEL_RESOURCE_ATTRIBUTES": f"k8s.cluster.name={name}"} for name in "ab"),
        tuple({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": error_file(name, 0, 0)} for name in ("101_a", "101_b")),
        tuple({"SLURM_JOB_ID": "8", "TORCHELASTIC_RUN_ID": name} for name in "ab"),
    ],
)
def test_what_is_unique_in_one_place_alone_is_another_run_elsewhere(
    one: dict[str, str], other: dict[str, str]
) -> None:
    """Metrics of two jobs under one id are the metrics of neither."""
    assert found(one).run_id != found(other).run_id


def test_a_rendezvous_of_the_same_name_next_day_or_of_another_account_is_another_run() -> None:
    """`--rdzv-id 101` is in a script that is started again and again, and copied."""
    today, next_day = found(TORCHRUN), found(TORCHRUN, parent=lambda: "boot/1/99")
    theirs, ours = (found({**TORCHRUN, **ON_TWO_HOSTS}, user=user) for user in (1000, 1001))

    assert today.run_id.startswith("101-")
    assert today.run_id != next_day.run_id
    assert theirs.run_id != ours.run_id


@pytest.mark.parametrize(
    "environ", [ON_TWO_HOSTS, {**TORCHRUN, **ON_TWO_HOSTS}, {**ON_TWO_HOSTS, "MASTER_ADDR": "localhost"}]
)
def test_ranks_on_several_hosts_are_a_run_of_their_own_each_time_that_they_agree_anew(
    environ: dict[str, str],
) -> None:
    """The same address, port and size the next day are another run."""
    monday = [
        found({**environ, "RANK": str(rank)}, host=host, start=lambda _: "monday").run_id
        for rank, host in ((0, "node-a"), (3, "node-b"))
    ]

    assert monday[0] == monday[1] != found(environ, start=lambda _: "tuesday").run_id


@pytest.mark.parametrize(
    "job", [{"SLURM_JOB_ID": "4711"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"WANDB_RUN_ID": "w"}]
)
def test_ranks_whose_job_is_known_ask_no_other_rank(job: dict[str, str]) -> None:
    """What is requeued, or a pod that is started again, is the same run."""

    def asked(_: Mapping[str, str]) -> str:
        raise AssertionError("another rank was asked")

    found({**ON_TWO_HOSTS, **job}, start=asked)


def test_ranks_and_restarts_of_one_torchrun_are_one_run_also_behind_a_wrapper() -> None:
    """Each rank may have a shell of its own above it; the folder that torchrun makes is the same."""
    ids = {
        found(
            {**TORCHRUN, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file("101_a", attempt, rank),
             "TORCHELASTIC_RESTART_COUNT": str(attempt)},
            parent=partial(str, f"boot/{rank}/7"),
        ).run_id
        for attempt in range(3) for rank in range(2)
    }  # fmt: skip

    assert len(ids) == 1


def test_a_container_that_is_started_again_goes_on_with_the_run_of_its_pod() -> None:
    """It is the same job; its torchrun is another process with another folder."""
    pod = {**TORCHRUN, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "LOCAL_RANK": "0"}
    here = replace(ALONE, namespace=lambda: "speech", host="job-worker-0")
    first = found({**pod, "TORCHELASTIC_ERROR_FILE": error_file("101_a", 0, 0)}, process=here)
    again = found({**pod, "TORCHELASTIC_ERROR_FILE": error_file("101_b", 0, 0)}, process=here)
    elsewhere = found(pod, process=replace(here, namespace=lambda: "vision"))

    assert first.run_id == again.run_id != elsewhere.run_id


def test_a_requeued_job_of_slurm_is_one_run() -> None:
    """Same number, same cluster; the second start counts as an attempt."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_CLUSTER_NAME": "berlin", "SLURM_JOB_START_TIME": "1"}
    again = found({**job, "SLURM_RESTART_COUNT": "1", "SLURM_JOB_START_TIME": "2"})

    assert (again.run_id, again.attempt) == (found(job).run_id, 1)


def test_the_namespace_of_a_pod_is_read_where_kubernetes_mounts_it(tmp_path: Path) -> None:
    """No variable has it unless the pod's manifest sets one."""
    (tmp_path / "namespace").write_text("speech\n")

    assert pod_namespace(str(tmp_path / "namespace")) == "speech"
    assert pod_namespace(str(tmp_path / "none")) == ""


def test_ranks_of_a_real_torchrun_agree_over_a_restart_and_two_starts_do_not(tmp_path: Path) -> None:
    """What torchrun tells its workers is its own, and changes with its versions."""
    program = tmp_path / "start.py"
    program.write_text(
        "import os, sys\n"
        "from otel_train.config import Config\n"
        "from otel_train.resource import detect\n"
        f"folder = os.path.join({str(tmp_path)!r}, sys.argv[1])\n"
        "os.makedirs(folder, exist_ok=True)\n"
        "started = os.environ['RANK'] + '-' + os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "run_id = detect(Config()).run_id\n"  # before the file is there: torchrun may end this rank at any time
        "open(os.path.join(folder, started), 'w').write(run_id)\n"
        "sys.exit(started.endswith('-0'))\n"
    )
    options = (
        "--rdzv-id=101 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nproc-per-node=2 --max-restarts=1"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(program)]
    others = ("SLURM_", "OTEL_", "WANDB_")
    bare = {name: text for name, text in os.environ.items() if not name.startswith(others)}
    starts = []
    for start in ("first", "second"):
        subprocess.run([*launch, start], capture_output=True, timeout=100, check=True, env=bare)
        started = {path.name: path.read_text() for path in (tmp_path / start).iterdir()}
        assert {"0-1", "1-1"} <= started.keys()
        assert {"0-0", "1-0"} & started.keys()  # torchrun ends the other one when the first has failed
        assert len(set(started.values())) == 1
        starts.append(started["0-1"])

    assert starts[0] != starts[1]


def test_ranks_agree_on_an_id_without_talking() -> None:
    """Ids made rank by rank would split one run into many. All that two hosts have in common is their rendezvous."""
    environ = {**TORCHRUN, "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    first = found({**environ, "RANK": "0"})
    second = found({**environ, "RANK": "1"}, pid=8, entropy=os.urandom)
    other_launcher = found({**environ, "RANK": "0"}, parent=lambda: "boot/1/3")
    far = found({**ON_TWO_HOSTS, "RANK": "3"}, host="node-b", parent=lambda: "other/4/5")

    assert first.run_id == second.run_id != other_launcher.run_id
    assert found({**ON_TWO_HOSTS, "RANK": "0"}).run_id == far.run_id


def test_children_of_one_process_see_the_same_parent() -> None:
    """Read from the system, not invented: this is what ranks of one host agree by."""
    program = "from otel_train.resource import parent_mark; print(parent_mark())"
    marks = [printed_by("-c", program).strip() for _ in "12"]

    assert marks[0] == marks[1]
    assert str(os.getpid()) in marks[0]
    assert marks[0] != parent_mark()


@pytest.mark.parametrize(("environ", "place"), [
    # torchrun on the second of two hosts
    ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1", (5, 8, 1, 4, 1)),
    # Ray Train
    ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 NODE_RANK=1", (3, 4, 1, 2, 1)),
    # a script that sets what torch.distributed needs, and no more
    ("RANK=1 WORLD_SIZE=2", (1, 2, 1, 2, 0)),
    # srun
    ("SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_NODEID=1", (6, 8, 2, 4, 1)),
    # an sbatch script: task 0 of 8 in name, alone in fact
    ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", (0, 1, 0, 1, 0)),
    # mpirun inside an allocation: Slurm counts its daemons, not the ranks
    ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2",
     (3, 4, 1, 2, 1)),
    ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 2, 1, 2, 0)),
    # mpirun of MVAPICH2
    ("MV2_COMM_WORLD_RANK=5 MV2_COMM_WORLD_SIZE=8 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=4", (5, 8, 1, 4, 1)),
    # a pod of Kubeflow's PyTorchJob that starts python itself
    ("RANK=2 WORLD_SIZE=4 MASTER_ADDR=job-master-0 PET_NNODES=4 KUBERNETES_SERVICE_HOST=10.0.0.1", (2, 4, 0, 1, 2)),
    # a pod of it that starts torchrun
    ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=job-master-0 PET_NODE_RANK=1 KUBERNETES_SERVICE_HOST=10.0.0.1",
     (5, 8, 1, 4, 1)),
    # pods of an Indexed Job: ranks, and independent trials
    ("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 MASTER_ADDR=job-0.job KUBERNETES_SERVICE_HOST=10.0.0.1", (3, 4, 0, 1, 3)),
    ("JOB_COMPLETION_INDEX=3 KUBERNETES_SERVICE_HOST=10.0.0.1", (0, 1, 0, 1, 0)),
    # ranks that a script has spawned inside one pod
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost KUBERNETES_SERVICE_HOST=10.0.0.1", (1, 2, 1, 2, 0)),
    # torchrun inside a Slurm step: Slurm's task is the agent
    ("RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0",
     (6, 8, 2, 4, 1)),
    ("RANK=one WORLD_SIZE=many", (0, 1, 0, 1, 0)),
])  # fmt: skip
def test_the_place_of_a_process_is_what_its_launcher_says(environ: str, place: tuple[int, ...]) -> None:
    """A rank that thinks it is rank 0 exports what only rank 0 may export."""
    assert tuple(rank_place(dict(word.split("=") for word in environ.split()))) == place


def test_an_initialised_process_group_knows_better_than_the_environment() -> None:
    """The program may pass ranks to ``init_process_group``."""
    info = found({"RANK": "0", "WORLD_SIZE": "1"}, live_ranks=lambda: (1, 2))

    assert (info.rank, info.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("available", "initialized", "ranks"), [(True, True, (1, 2)), (True, False, None), (False, True, None)]
)
def test_a_process_group_is_asked_only_once_it_exists(
    available: bool, initialized: bool, ranks: object
) -> None:
    """Asking earlier raises, and importing torch for it costs seconds."""
    group = SimpleNamespace(
        is_available=lambda: available, is_initialized=lambda: initialized, get_rank=lambda: 1, get_world_size=lambda: 2,
    )  # fmt: skip

    assert live_ranks({"torch.distributed": group}) == ranks
    assert live_ranks({}) is None


@pytest.mark.parametrize(
    ("settings", "leaders"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"tensor_parallel": 2}, [0, 2, 4, 6]),
        ({"pipeline_parallel": 2}, [0, 1, 2, 3]),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, [0, 2]),
    ],
)
def test_one_rank_of_each_model_replica_counts_its_samples(
    settings: dict[str, int], leaders: list[int]
) -> None:
    """Ranks that share a replica see the same samples: counted by all they would be so many times too many."""
    config = Config(run_id="r", **settings)  # type: ignore[arg-type]  # whole numbers
    ranks = [found({"RANK": str(rank), "WORLD_SIZE": "8"}, config=config) for rank in range(8)]

    assert [info.rank for info in ranks if info.dp_leader] == leaders
    assert {info.replica_ranks for info in ranks} == {8 // len(leaders)}


def test_a_worker_of_ray_train_is_asked_for_its_place() -> None:
    """Without the torch backend nothing in the environment tells it."""
    place = {"world_rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1}
    context = SimpleNamespace(**{f"get_{name}": partial(int, number) for name, number in place.items()})
    modules = {"ray.train": SimpleNamespace(get_context=lambda: context)}
    process = replace(ALONE, ray=lambda: ray_environment(modules))

    info = found({"RAY_JOB_ID": "01000000"}, process=process)
    assert (info.rank, info.world_size, info.local_rank, info.node_rank) == (3, 4, 1, 1)
    assert found({"RANK": "0", "WORLD_SIZE": "1"}, process=process).rank == 0


def test_outside_a_worker_ray_tells_nothing() -> None:
    """The driver imports ray.train as well, and asking there raises."""

    def refuses() -> None:
        raise RuntimeError("get_context() outside a worker")

    assert ray_environment({"ray.train": SimpleNamespace(get_context=refuses)}) == {}
    assert ray_environment({}) == {}


def test_restarts_of_launcher_and_scheduler_add_up_to_the_attempt() -> None:
    """A job requeued once whose workers restarted twice is in its fourth life."""
    environ = {"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "1"}

    assert found(environ).attempt == 3
    assert found(environ, config=Config(attempt=0)).attempt == 0
    placed = found(environ).placed("job-2", 3, 9)
    assert (placed.run_id, placed.training, placed.attempt) == ("job-2", 3, 9)
    assert placed.instance_id == instance_id("job-2", placed.rank)


def test_the_instance_id_is_stable_over_restarts_and_differs_between_ranks() -> None:
    """A restarted rank goes on with its series; two ranks never share one."""
    first = found({"WANDB_RUN_ID": "w", "RANK": "0", "WORLD_SIZE": "2"})
    again = found({"WANDB_RUN_ID": "w", "RANK": "0", "WORLD_SIZE": "2", "SLURM_RESTART_COUNT": "1"})
    other = found({"WANDB_RUN_ID": "w", "RANK": "1", "WORLD_SIZE": "2"})

    assert first.instance_id == again.instance_id != other.instance_id
    assert UUID(first.instance_id).version == 5


def test_the_resource_says_who_sends() -> None:
    """A collector joins what it receives by these names."""
    environ = {
        "OTEL_SERVICE_NAME": "speech", "WANDB_RUN_ID": "w", "SLURM_JOB_ID": "8", "SLURM_JOB_PARTITION": "gpu",
        "OTEL_RESOURCE_ATTRIBUTES": "service.namespace=team%20a,service.name=lost,train.rank=99,service.version=1.2",
    }  # fmt: skip
    torch = SimpleNamespace(__version__="2.9", version=SimpleNamespace(cuda="13.0"))

    attributes = resource_attributes(found(environ), environ, modules={"torch": torch})

    expected = {
        "service.name": "speech", "service.namespace": "team a", "service.version": "1.2",
        "service.instance.id": found(environ).instance_id, "host.name": "node-a", "process.pid": 7,
        "telemetry.distro.version": __version__, "train.run.id": "w", "train.run.attempt": 0, "train.rank": 0,
        "train.local_rank": 0, "train.world.size": 1, "train.torch.version": "2.9", "train.cuda.version": "13.0",
        "slurm.job.id": "8", "slurm.partition": "gpu",
    }  # fmt: skip
    assert {name: attributes.get(name) for name in expected} == expected


def test_the_resource_says_whose_run_it_is_and_where() -> None:
    """Alerts carry it; the first attribute of several that mean the same wins, and what is not set is empty."""
    slurm = {"train.run.name": "gpt", "team": "speech", "service.namespace": "x", "slurm.job.id": "8"}

    assert about_run(slurm) == ("gpt", "speech", "", "8", "", "")
    assert about_run({"k8s.cluster.name": "a", "k8s.namespace.name": "b"})[4:] == ("a", "b")


def test_without_torch_and_names_the_resource_has_neither() -> None:
    """Absent is absent: no "unknown", no empty text."""
    attributes = resource_attributes(found({}), {}, modules={})

    assert attributes["service.name"] == "otel-train"
    assert not any("torch" in name or "cuda" in name or "slurm" in name for name in attributes)
    assert "" not in attributes.values()


def test_a_host_name_that_is_set_wins_over_the_one_that_is_found() -> None:
    """In a container the host calls itself by a random id; other exporters on it do not."""
    assert found({"OTEL_RESOURCE_ATTRIBUTES": "host.name=gpu-17"}).host == "gpu-17"


def test_malformed_resource_attributes_are_ignored_as_a_whole_and_reported() -> None:
    """The specification asks for it: half of an identity is worse than none."""
    assert resource_environment({"OTEL_RESOURCE_ATTRIBUTES": "a=b,oops"}) == {}

    [ignored] = wrong_resource({"OTEL_RESOURCE_ATTRIBUTES": "a=b,oops"})
    assert ignored.problem.startswith("OTEL_RESOURCE_ATTRIBUTES: 'oops': expected name=value")
    assert wrong_resource({"OTEL_RESOURCE_ATTRIBUTES": "a=b,"}) == []
    assert resource_environment({"OTEL_RESOURCE_ATTRIBUTES": "a=b=c, d=%2C ,"}) == {"a": "b=c", "d": ","}
