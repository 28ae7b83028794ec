"""Every metric, span and attribute that otel_train publishes. Everything else derives from it."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from otel_train.recording import events


class Kind(Enum):
    """How readings of a metric combine over time."""

    COUNTER = "counter"
    UPDOWN = "updowncounter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Emit(Enum):
    """Which ranks publish a metric."""

    ALL = "all"
    RANK0 = "rank0"
    DP_LEADER = "dp-leader"
    NODE = "first rank of a node"


OTHER_VALUE: Final = "_OTHER"
"""What an attribute value becomes when its bound is reached."""

DURATION_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Explicit bucket edges of durations, in seconds."""

STEP_BOUNDS: Final = tuple(float(f"{10 ** (part / 14):.3g}") for part in range(-46, 26))
"""Explicit bucket edges of step time, from 0.5 ms to 61 s, each at most 1.19 times the one before: quantiles are as near."""

STAGES: Final = (*(stage.name for stage in events.STAGES), "other")
PHASES: Final = ("train", "eval", "test", "predict")
ACTIVITIES: Final = (
    *("init", "compile", "productive", "data_wait", "eval"),
    *("checkpoint", "restart", "stalled", "other", "outside"),
)
RUN_STATES: Final = (
    *("initializing", "training", "evaluating", "checkpointing"),
    *("stalled", "finished", "failed"),
)

_UNIT_SUFFIXES: Final = {
    "s": "_seconds",
    "By": "_bytes",
    "W": "_watts",
    "Cel": "_celsius",
    "{sample}/s": "_per_second",
    "{flop}/s": "_per_second",
}


# Named tuples, because building a frozen dataclass takes 0.6 ms of every import.
class Label(NamedTuple):
    """An attribute that a metric may carry.

    Attributes:
        name: OpenTelemetry name, dotted.
        bound: most values one process may publish; further ones become ``_OTHER``.
        meaning: one sentence.
        values: the values we publish ourselves, where they are known beforehand.
        open: whether values from the user or from the machine may join or make up ``values``.
    """

    name: str
    bound: int
    meaning: str
    values: tuple[str, ...] = ()
    open: bool = False

    @property
    def prometheus(self) -> str:
        """Name after the OpenTelemetry to Prometheus translation."""
        return self.name.replace(".", "_")


class Metric(NamedTuple):
    """One metric, published or reserved.

    Attributes:
        name: OpenTelemetry name, dotted, without unit.
        unit: UCUM code: ``s``, ``By``, ``1`` for a ratio, ``{step}`` for a count.
        kind: how readings combine over time.
        meaning: one sentence a person on call can act on.
        labels: the only attributes it may carry.
        bounds: explicit bucket edges in ``unit``, rising. Empty unless a histogram.
        emit: which ranks publish it.
        priority: ``P0`` needed by rules and dashboards, ``P1`` and ``P2`` useful.
        published: whether this version publishes it; otherwise the name is reserved.
    """

    name: str
    unit: str
    kind: Kind
    meaning: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()
    emit: Emit = Emit.ALL
    priority: str = "P0"
    published: bool = True

    @property
    def prometheus(self) -> str:
        """Name after the OpenTelemetry to Prometheus translation, without ``_bucket`` and the like."""
        # Unit "1" becomes "_ratio" on gauges that arrive by OTLP, and nothing on those that Python
        # serves itself. Our ratios end in ".ratio" already, which both leave alone.
        total = "_total" if self.kind is Kind.COUNTER else ""
        return self.name.replace(".", "_") + _UNIT_SUFFIXES.get(self.unit, "") + total


STAGE: Final = Label(
    name="train.stage",
    bound=8,
    meaning="What the training thread was doing; user-defined stages join the built-in ones.",
    values=STAGES,
    open=True,
)
LOADER: Final = Label(
    name="train.loader",
    bound=16,
    meaning="Name of the loader, as given to `instrument` or found.",
    open=True,
)
PHASE: Final = Label(
    name="train.phase",
    bound=4,
    meaning="What the batch was for.",
    values=PHASES,
)
ACTIVITY: Final = Label(
    name="train.run.activity",
    bound=10,
    meaning="What the run was doing, from afar; `outside` is in no batch: between passes, or after the loop.",
    values=ACTIVITIES,
)
RUN_STATE: Final = Label(
    name="train.run.state",
    bound=8,
    meaning="State the run can be in.",
    values=RUN_STATES,
)
SKIP_REASON: Final = Label(
    name="train.step.skip.reason",
    bound=6,
    meaning="Why an optimizer step changed nothing.",
    values=("amp_overflow", "nonfinite", "user"),
)
LOSS_NAME: Final = Label(
    name="train.loss.name",
    bound=8,
    meaning="Which loss; `loss` unless you log several.",
    open=True,
)
OPTIMIZER_GROUP: Final = Label(
    name="train.optimizer.group",
    bound=8,
    meaning="Parameter group: its `name` where it has one, else its number.",
    open=True,
)
NONFINITE_KIND: Final = Label(
    name="train.nonfinite.kind",
    bound=4,
    meaning="What was not finite.",
    values=("loss", "gradient", "parameter", "activation"),
)
METRIC_NAME: Final = Label(
    name="train.metric.name",
    bound=32,
    meaning="Name of a user-defined metric.",
    open=True,
)
WORKER_STATE: Final = Label(
    name="train.loader.worker.state",
    bound=3,
    meaning="State of a loader's worker processes.",
    values=("alive", "dead", "expected"),
)
EXHAUSTION_REASON: Final = Label(
    name="train.loader.exhaustion.reason",
    bound=4,
    meaning="Why a loader ended: the end of its data, earlier than `len()` promised, an exception, or the end of a stream of unknown length.",
    values=("epoch_end", "short", "error", "streaming_end"),
)
ERROR_TYPE: Final = Label(
    name="error.type",
    bound=16,
    meaning="Exception class or signal; absent when nothing failed.",
    open=True,
)
CPU_MODE: Final = Label(
    name="cpu.mode",
    bound=3,
    meaning="Where the processor time was spent.",
    values=("user", "system"),
)
MEMORY_COMPONENT: Final = Label(
    name="train.memory.component",
    bound=6,
    meaning="What holds the memory; components are disjoint.",
    values=("dataset", "cache", "prefetch_queue", "pinned", "workers"),
)
DEVICE: Final = Label(
    name="hw.name",
    bound=16,
    meaning="The accelerator.",
    open=True,
)
TRANSFER_DIRECTION: Final = Label(
    name="train.transfer.direction",
    bound=2,
    meaning="From host to device, or back.",
    values=("h2d", "d2h"),
)
CHECKPOINT_OPERATION: Final = Label(
    name="train.checkpoint.operation",
    bound=4,
    meaning="`save` blocks the loop, `persist` is the background part, `load` reads one back.",
    values=("save", "persist", "load"),
)
STATISTIC: Final = Label(
    name="train.statistic",
    bound=4,
    meaning="Which statistic over the ranks.",
    values=("min", "median", "p95", "max"),
)
RANK_EVENT: Final = Label(
    name="train.rank.event",
    bound=8,
    meaning="What happened on some rank.",
    values=("oom", "loader_worker_exit", "nonfinite", "exception", "drop", "stall"),
)
RUN_NAME: Final = Label(name="train.run.name", bound=1, meaning="Name of the run, for people.", open=True)
TEAM: Final = Label(
    name="train.team",
    bound=1,
    meaning="Team that the run belongs to: resource attribute `train.team`, `team` or `service.namespace`.",
    open=True,
)
OWNER: Final = Label(
    name="train.owner",
    bound=1,
    meaning="Person to contact: resource attribute `train.owner` or `owner`.",
    open=True,
)
JOB: Final = Label(
    name="train.job",
    bound=1,
    meaning="The scheduler's job: resource attribute `slurm.job.id`, `k8s.job.name` or `train.job`.",
    open=True,
)
CLUSTER: Final = Label(
    name="train.cluster",
    bound=1,
    meaning="Where it runs: resource attribute `k8s.cluster.name`, `slurm.cluster.name` or `train.cluster`.",
    open=True,
)
NAMESPACE: Final = Label(
    name="train.namespace",
    bound=1,
    meaning="The same within the cluster: resource attribute `k8s.namespace.name`, `slurm.partition` or `train.namespace`.",
    open=True,
)
PEER_RANK: Final = Label(
    name="train.peer.rank",
    bound=3,
    meaning="The rank that is spoken of. Rank 0 sends the series, three ranks at a time.",
    open=True,
)
PEER_HOST: Final = Label(
    name="train.peer.host",
    bound=3,
    meaning="Host of the rank that is spoken of.",
    open=True,
)
PROCESS_GROUP: Final = Label(
    name="train.process_group",
    bound=6,
    meaning="Which process group.",
    open=True,
)
PROFILER_TRIGGER: Final = Label(
    name="train.profiler.trigger",
    bound=5,
    meaning="What armed the capture.",
    values=("schedule", "on_demand", "slow_step", "alert", "signal"),
)
PROFILER_ALERT: Final = Label(
    name="train.profiler.alert",
    bound=1,
    meaning="Name of the alert that armed the capture; absent where none did. One at a time.",
    open=True,
)
CAPTURE_FILE: Final = Label(
    "train.profiler.file", 1, "The newest trace of this process, within its run directory.", open=True
)
CAPTURE_FINDING: Final = Label(
    name="train.profiler.finding.name",
    bound=13,
    meaning="The rule whose finding leads in that trace; absent where it was not analysed. One at a time.",
    values=(
        *(
            "input_bound",
            "launch_bound",
            "host_bound",
            "sync_bound",
            "exposed_communication",
            "pageable_copies",
        ),
        *("no_tensor_cores", "unfused_optimizer", "heavy_op", "memory_growth", "straggler", "no_finding"),
        "nothing_recorded",
    ),
)
SIGNAL: Final = Label(
    name="train.telemetry.signal",
    bound=3,
    meaning="What kind of record.",
    values=("metrics", "spans", "records"),
)
DROP_REASON: Final = Label(
    name="train.telemetry.drop.reason",
    bound=8,
    meaning="Why a record did not leave the process.",
    values=(
        "queue_full",
        "rate_limited",
        "serialization",
        "shutdown",
        "sampled_out",
        "overrun",
        "export_failed",
        "rejected",
    ),
)
OVERFLOWN: Final = Label(
    name="train.telemetry.attribute",
    bound=12,
    meaning="The attribute whose bound was reached.",
    open=True,
)
COMPONENT: Final = Label(
    name="train.telemetry.component",
    bound=16,
    meaning="Component of otel_train that failed.",
    open=True,
)
GAP_KIND: Final = Label(
    name="train.instrumentation.gaps.kind",
    bound=4,
    meaning="What could not be seen.",
    values=("stage", "model", "loop", "flops"),
)
GAP_REASON: Final = Label(
    name="train.instrumentation.gaps.reason",
    bound=4,
    meaning="Never seen at all, seen but not distinguished from another, or seen until its hook was gone.",
    values=("never_seen", "ambiguous", "unhooked"),
)

STAGE_DURATION: Final = Metric(
    name="train.stage.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Host wall time of one occurrence of a stage. `data` is the time the loop waited in `next(loader)`; long `data` in train steps means starved devices.",
    labels=(
        STAGE,
        LOADER,
        PHASE,
    ),
    bounds=DURATION_BOUNDS,
)
STAGE_DEVICE_DURATION: Final = Metric(
    name="train.stage.device.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Accelerator time of one occurrence of a stage, between two events read later without a sync. Of a sample of whole steps: read means and shares, not sums. Never add it to host time.",
    labels=(
        STAGE,
        LOADER,
        PHASE,
    ),
    bounds=DURATION_BOUNDS,
)
STEP_DURATION: Final = Metric(
    name="train.step.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Wall time of one step, from ask to ask; the self times of its stages add up to it.",
    labels=(
        LOADER,
        PHASE,
    ),
    bounds=STEP_BOUNDS,
)
STEPS: Final = Metric(
    name="train.steps",
    unit="{step}",
    kind=Kind.COUNTER,
    meaning="Completed steps: optimizer updates in phase train, batches elsewhere. Ranks may differ with uneven inputs: aggregate with max, never sum.",
    labels=(
        LOADER,
        PHASE,
    ),
)
BATCHES: Final = Metric(
    name="train.batches",
    unit="{batch}",
    kind=Kind.COUNTER,
    meaning="Batches consumed; more than steps under gradient accumulation.",
    labels=(
        LOADER,
        PHASE,
    ),
)
SAMPLES: Final = Metric(
    name="train.samples",
    unit="{sample}",
    kind=Kind.COUNTER,
    meaning="Samples consumed. Only data-parallel leaders count, and where rank 0 alone exports it counts for all of them: the sum is the global number in every profile.",
    labels=(
        LOADER,
        PHASE,
    ),
    emit=Emit.DP_LEADER,
)
TOKENS: Final = Metric(
    name="train.tokens",
    unit="{token}",
    kind=Kind.COUNTER,
    meaning="Tokens consumed, without padding. Counted by the same ranks as samples: the sum is the global number in every profile.",
    labels=(
        LOADER,
        PHASE,
    ),
    emit=Emit.DP_LEADER,
)
BATCH_TIME: Final = Metric(
    name="train.batch.time",
    unit="s",
    kind=Kind.COUNTER,
    meaning="Wall seconds of a loader's own batches, from the ask to the end of the work on them, on rank 0. Samples or batches over it are the loader's rate; over wall time they are throughput. A batch of two loaders counts for both: never sum over loaders.",
    labels=(
        LOADER,
        PHASE,
    ),
    emit=Emit.RANK0,
)
STEP_SKIPS: Final = Metric(
    name="train.step.skips",
    unit="{step}",
    kind=Kind.COUNTER,
    meaning="Optimizer steps that changed nothing, by reason. Steady growth means that the loss scale does not stabilize.",
    labels=(SKIP_REASON,),
)
STEP_INDEX: Final = Metric(
    name="train.step.index",
    unit="{step}",
    kind=Kind.GAUGE,
    meaning="Step number as the user counts it; goes on after a resume.",
    emit=Emit.RANK0,
)
EPOCH_INDEX: Final = Metric(
    name="train.epoch.index",
    unit="{epoch}",
    kind=Kind.GAUGE,
    meaning="Current pass over each loader, from 0.",
    labels=(LOADER,),
    emit=Emit.RANK0,
    priority="P1",
)
EPOCH_DURATION: Final = Metric(
    name="train.epoch.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Wall time of one full pass of a loader.",
    labels=(
        LOADER,
        PHASE,
    ),
    bounds=DURATION_BOUNDS,
    emit=Emit.RANK0,
    priority="P1",
    published=False,
)
THROUGHPUT_THEORETICAL: Final = Metric(
    name="train.throughput.theoretical",
    unit="{sample}/s",
    kind=Kind.GAUGE,
    meaning="Upper bound of global samples per second, configured or calibrated without the data stage. The gap to the real rate, over the time of the loader's own batches, is what the loader costs.",
    labels=(LOADER,),
    emit=Emit.RANK0,
)
MFU_RATIO: Final = Metric(
    name="train.mfu.ratio",
    unit="1",
    kind=Kind.GAUGE,
    meaning="Model FLOP utilisation over the last export interval.",
    emit=Emit.RANK0,
    priority="P1",
    published=False,
)
MODEL_FLOPS: Final = Metric(
    name="train.model.flops",
    unit="{flop}",
    kind=Kind.COUNTER,
    meaning="Model FLOP executed, without recomputation. Counted by the same ranks as samples: the sum is the global number in every profile.",
    emit=Emit.DP_LEADER,
)
ACCELERATOR_FLOPS_LIMIT: Final = Metric(
    name="train.accelerator.flops.limit",
    unit="{flop}/s",
    kind=Kind.GAUGE,
    meaning="Peak dense FLOP/s of the device: `device_flops`, else BF16 of the data sheet of a device that is known.",
    labels=(DEVICE,),
)
RUN_INFO: Final = Metric(
    name="train.run.info",
    unit="{run}",
    kind=Kind.GAUGE,
    meaning="1; its labels say whose run it is, and where. Alerts on the run carry them.",
    labels=(RUN_NAME, TEAM, OWNER, JOB, CLUSTER, NAMESPACE),
    emit=Emit.RANK0,
)
RUN_STATUS: Final = Metric(
    name="train.run.status",
    unit="1",
    kind=Kind.UPDOWN,
    meaning="1 for the state the run is in, 0 for all others.",
    labels=(RUN_STATE,),
)
RUN_TIME: Final = Metric(
    name="train.run.time",
    unit="s",
    kind=Kind.COUNTER,
    meaning="Wall seconds by activity; the activities add up to the elapsed time.",
    labels=(ACTIVITY,),
    emit=Emit.RANK0,
)
RUN_PROGRESS_RATIO: Final = Metric(
    name="train.run.progress.ratio",
    unit="1",
    kind=Kind.GAUGE,
    meaning="Steps done over steps planned, where the plan is known.",
    emit=Emit.RANK0,
    priority="P1",
)
RUN_RESTARTS: Final = Metric(
    name="train.run.restarts",
    unit="{restart}",
    kind=Kind.COUNTER,
    meaning="How often the run was restarted.",
    emit=Emit.RANK0,
)
WORLD_SIZE: Final = Metric(
    name="train.world.size",
    unit="{rank}",
    kind=Kind.GAUGE,
    meaning="Ranks in the run.",
    emit=Emit.RANK0,
)
RANKS_EXPECTED: Final = Metric(
    name="train.ranks.expected",
    unit="{rank}",
    kind=Kind.GAUGE,
    meaning="Ranks that should report under the export profile; fewer reporting means some are gone or mute.",
    emit=Emit.RANK0,
)
HEARTBEAT_TIME: Final = Metric(
    name="train.heartbeat.time",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Unix time of the last progress of any kind (batch, step, checkpoint). It keeps flowing while the loop hangs, so its age is the length of the hang.",
)
STALL_THRESHOLD: Final = Metric(
    name="train.stall.threshold",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Age of the heartbeat from which the run counts as stalled, in the activity that is open now: the longer of `stall_after_s` and 20 median steps in training, more in evaluations and checkpoints, as they have taken before. At least that of the ranks it waits for. Alerts compare with it.",
)
STALL_EVENTS: Final = Metric(
    name="train.stall.events",
    unit="{event}",
    kind=Kind.COUNTER,
    meaning="Stalls seen, by the stage the rank was in. In a synchronous hang the rank whose stage differs is the suspect.",
    labels=(STAGE,),
)
RANK_TIME: Final = Metric(
    name="train.rank.time",
    unit="s",
    kind=Kind.COUNTER,
    meaning="Wall seconds since this process began to record. The rate of a counter over the rate of this one is right from the first minute on, and up to the end.",
)
HEARTBEAT_STEP: Final = Metric(
    name="train.heartbeat.step",
    unit="{step}",
    kind=Kind.GAUGE,
    meaning="Step number at the last heartbeat; the lowest rank is behind.",
)
LOSS: Final = Metric(
    name="train.loss",
    unit="{loss}",
    kind=Kind.GAUGE,
    meaning="Last loss that was logged; read later, never forcing a sync.",
    labels=(LOSS_NAME, PHASE),
    emit=Emit.RANK0,
)
GRADIENT_NORM: Final = Metric(
    name="train.gradient.norm",
    unit="{norm}",
    kind=Kind.GAUGE,
    meaning="Last global gradient norm that was logged or clipped.",
    emit=Emit.RANK0,
)
LEARNING_RATE: Final = Metric(
    name="train.learning_rate",
    unit="{lr}",
    kind=Kind.GAUGE,
    meaning="Learning rate of each parameter group.",
    labels=(OPTIMIZER_GROUP,),
    emit=Emit.RANK0,
)
AMP_SCALE: Final = Metric(
    name="train.amp.scale",
    unit="{scale}",
    kind=Kind.GAUGE,
    meaning="Loss scale of the gradient scaler.",
    emit=Emit.RANK0,
    priority="P1",
)
NONFINITE_DETECTIONS: Final = Metric(
    name="train.nonfinite.detections",
    unit="{detection}",
    kind=Kind.COUNTER,
    meaning="Times a loss, gradient, parameter or activation was not finite. More than a few: look at the last good checkpoint.",
    labels=(NONFINITE_KIND,),
)
METRIC_VALUE: Final = Metric(
    name="train.metric.value",
    unit="{value}",
    kind=Kind.GAUGE,
    meaning="User-defined metrics, names from an allow-list.",
    labels=(METRIC_NAME, PHASE, LOADER),
    emit=Emit.RANK0,
    priority="P2",
)
LOADER_BATCH_BUILD_DURATION: Final = Metric(
    name="train.loader.batch.build.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Time a worker took to fetch and collate one batch, measured in the worker.",
    labels=(LOADER,),
    bounds=DURATION_BOUNDS,
    priority="P1",
)
LOADER_START_DURATION: Final = Metric(
    name="train.loader.start.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Time from the ask for a new pass over a loader to its first batch: making the iterator and its workers, and the first wait. Large and once per epoch: keep the workers.",
    labels=(LOADER,),
    bounds=DURATION_BOUNDS,
    priority="P1",
)
LOADER_WORKER_COUNT: Final = Metric(
    name="train.loader.worker.count",
    unit="{worker}",
    kind=Kind.UPDOWN,
    meaning="Worker processes of a loader by state; any dead one stops or slows its loader.",
    labels=(LOADER, WORKER_STATE),
)
LOADER_WORKER_EXITS: Final = Metric(
    name="train.loader.worker.exits",
    unit="{exit}",
    kind=Kind.COUNTER,
    meaning="Worker processes that ended, by signal or exception.",
    labels=(LOADER, ERROR_TYPE),
)
LOADER_QUEUE_SIZE: Final = Metric(
    name="train.loader.queue.size",
    unit="{batch}",
    kind=Kind.UPDOWN,
    meaning="Batches ready in the prefetch queue when the loop asked. Near zero means the workers cannot keep up.",
    labels=(LOADER,),
)
LOADER_QUEUE_LIMIT: Final = Metric(
    name="train.loader.queue.limit",
    unit="{batch}",
    kind=Kind.UPDOWN,
    meaning="Most batches the prefetch queue can hold: workers times prefetch factor.",
    labels=(LOADER,),
    priority="P1",
)
LOADER_EXHAUSTIONS: Final = Metric(
    name="train.loader.exhaustions",
    unit="{exhaustion}",
    kind=Kind.COUNTER,
    meaning="Times a loader came to its end, by reason.",
    labels=(LOADER, EXHAUSTION_REASON),
)
LOADER_ERRORS: Final = Metric(
    name="train.loader.errors",
    unit="{error}",
    kind=Kind.COUNTER,
    meaning="Exceptions that left `next(loader)`.",
    labels=(
        LOADER,
        ERROR_TYPE,
    ),
    priority="P1",
)
PROCESS_MEMORY_USAGE: Final = Metric(
    name="process.memory.usage",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Resident memory of the training process.",
)
PROCESS_CPU_TIME: Final = Metric(
    name="process.cpu.time",
    unit="s",
    kind=Kind.COUNTER,
    meaning="Processor seconds of the training process.",
    labels=(CPU_MODE,),
    priority="P1",
)
PROCESS_THREAD_COUNT: Final = Metric(
    name="process.thread.count",
    unit="{thread}",
    kind=Kind.UPDOWN,
    meaning="Threads of the training process.",
    priority="P1",
)
PROCESS_UNIX_FILE_DESCRIPTOR_COUNT: Final = Metric(
    name="process.unix.file_descriptor.count",
    unit="{file_descriptor}",
    kind=Kind.UPDOWN,
    meaning="Open file descriptors; steady growth is a leak, often in a loader.",
    priority="P1",
)
MEMORY_USAGE: Final = Metric(
    name="train.memory.usage",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Host memory by component of the input pipeline.",
    labels=(
        LOADER,
        MEMORY_COMPONENT,
    ),
)
HOST_MEMORY_USAGE: Final = Metric(
    name="train.host.memory.usage",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Memory in use on the host or in the container, without what the page cache would give back.",
    emit=Emit.NODE,
)
HOST_MEMORY_LIMIT: Final = Metric(
    name="train.host.memory.limit",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Memory the host or the container allows; at the limit the kernel kills.",
    emit=Emit.NODE,
)
ACCELERATOR_MEMORY_ALLOCATED: Final = Metric(
    name="train.accelerator.memory.allocated",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Allocator: bytes in live tensors.",
    labels=(DEVICE,),
)
ACCELERATOR_MEMORY_RESERVED: Final = Metric(
    name="train.accelerator.memory.reserved",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Bytes reserved from the driver; the allocated bytes are part of them.",
    labels=(DEVICE,),
)
ACCELERATOR_MEMORY_LIMIT: Final = Metric(
    name="train.accelerator.memory.limit",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Device memory that this process may use.",
    labels=(DEVICE,),
)
ACCELERATOR_MEMORY_ALLOCATED_PEAK: Final = Metric(
    name="train.accelerator.memory.allocated_peak",
    unit="By",
    kind=Kind.GAUGE,
    meaning="Most bytes allocated at once since the program last reset its peaks. Never reset by otel_train: the program reads the same value.",
    labels=(DEVICE,),
)
ACCELERATOR_MEMORY_RESERVED_PEAK: Final = Metric(
    name="train.accelerator.memory.reserved_peak",
    unit="By",
    kind=Kind.GAUGE,
    meaning="Most bytes reserved at once since the program last reset its peaks.",
    labels=(DEVICE,),
)
ACCELERATOR_MEMORY_OOMS: Final = Metric(
    name="train.accelerator.memory.ooms",
    unit="{oom}",
    kind=Kind.COUNTER,
    meaning="Times the allocator ran out of memory.",
    labels=(DEVICE,),
)
ACCELERATOR_MEMORY_ALLOC_RETRIES: Final = Metric(
    name="train.accelerator.memory.alloc_retries",
    unit="{retry}",
    kind=Kind.COUNTER,
    meaning="Allocations that had to flush the cache first: the early warning before running out.",
    labels=(DEVICE,),
)
ACCELERATOR_IO: Final = Metric(
    name="train.accelerator.io",
    unit="By",
    kind=Kind.COUNTER,
    meaning="Bytes moved between host and device by instrumented transfers.",
    labels=(
        TRANSFER_DIRECTION,
        DEVICE,
    ),
    priority="P1",
)
HW_GPU_UTILIZATION: Final = Metric(
    name="hw.gpu.utilization.ratio",
    unit="1",
    kind=Kind.GAUGE,
    meaning="Share of the last sample period in which a kernel ran on the device. By NVML, where no DCGM exporter answers.",
    labels=(DEVICE,),
    priority="P1",
)
HW_GPU_MEMORY_USAGE: Final = Metric(
    name="hw.gpu.memory.usage",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Device memory in use by all processes. By NVML, where no DCGM exporter answers.",
    labels=(DEVICE,),
    priority="P1",
)
HW_GPU_MEMORY_LIMIT: Final = Metric(
    name="hw.gpu.memory.limit",
    unit="By",
    kind=Kind.UPDOWN,
    meaning="Device memory there is. By NVML, where no DCGM exporter answers.",
    labels=(DEVICE,),
    priority="P1",
)
HW_POWER: Final = Metric(
    name="hw.power",
    unit="W",
    kind=Kind.GAUGE,
    meaning="Power that the device draws. By NVML, where no DCGM exporter answers.",
    labels=(DEVICE,),
    priority="P1",
)
HW_TEMPERATURE: Final = Metric(
    name="hw.temperature",
    unit="Cel",
    kind=Kind.GAUGE,
    meaning="Temperature of the device. By NVML, where no DCGM exporter answers.",
    labels=(DEVICE,),
    priority="P1",
)
CHECKPOINT_DURATION: Final = Metric(
    name="train.checkpoint.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Time of one checkpoint operation. `save` is what the loop waited for.",
    labels=(
        CHECKPOINT_OPERATION,
        ERROR_TYPE,
    ),
    bounds=DURATION_BOUNDS,
    emit=Emit.RANK0,
)
CHECKPOINT_FAILURES: Final = Metric(
    name="train.checkpoint.failures",
    unit="{failure}",
    kind=Kind.COUNTER,
    meaning="Checkpoint operations that failed. Above zero the next crash costs more work.",
    labels=(CHECKPOINT_OPERATION,),
    emit=Emit.RANK0,
)
CHECKPOINT_LAST_SUCCESS_TIME: Final = Metric(
    name="train.checkpoint.last_success.time",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Unix time of the last durable checkpoint; the start of the run until there is one.",
    emit=Emit.RANK0,
)
CHECKPOINT_INTERVAL: Final = Metric(
    name="train.checkpoint.interval",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Time between checkpoints, declared or learned. Alerts compare with it.",
    emit=Emit.RANK0,
)
CHECKPOINT_SIZE: Final = Metric(
    name="train.checkpoint.size",
    unit="By",
    kind=Kind.GAUGE,
    meaning="Bytes written by the last save.",
    emit=Emit.RANK0,
    priority="P1",
    published=False,
)
EVAL_DURATION: Final = Metric(
    name="train.eval.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="One evaluation pass.",
    labels=(LOADER,),
    bounds=DURATION_BOUNDS,
    emit=Emit.RANK0,
)
STRAGGLER_EXCESS_RATIO: Final = Metric(
    name="train.straggler.excess.ratio",
    unit="1",
    kind=Kind.GAUGE,
    meaning="How much more work of its own, before the barrier, a rank has per step than the median rank, as a ratio of the median. The three ranks with the most, if it costs 5 % of the step; `train.stage` is where they lose most.",
    labels=(PEER_RANK, PEER_HOST, STAGE),
    emit=Emit.RANK0,
)
RANK_STALL_TIME: Final = Metric(
    name="train.rank.stall.time",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Seconds without progress, or without a record, of a rank that holds the others up, by the stage it was seen in last; three ranks at most. 0 once it has moved.",
    labels=(PEER_RANK, PEER_HOST, STAGE),
    emit=Emit.RANK0,
)
RANK_WORK_TIME: Final = Metric(
    name="train.rank.work.time",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Mean time of a stage per training step, over the ranks.",
    labels=(STAGE, STATISTIC),
    emit=Emit.RANK0,
)
RANKS_REPORTING: Final = Metric(
    name="train.ranks.reporting",
    unit="{rank}",
    kind=Kind.UPDOWN,
    meaning="Ranks whose last record came in time. Those that have ended by themselves no longer count.",
    emit=Emit.RANK0,
)
RANKS_EVENTS: Final = Metric(
    name="train.ranks.events",
    unit="{event}",
    kind=Kind.COUNTER,
    meaning="Events of all ranks, summed, ranks that have ended included.",
    labels=(RANK_EVENT,),
    emit=Emit.RANK0,
)
COLLECTIVE_WAIT_DURATION: Final = Metric(
    name="train.collective.wait.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Time inside monitored collectives.",
    labels=(PROCESS_GROUP,),
    bounds=DURATION_BOUNDS,
    priority="P2",
    published=False,
)
COMPILE_RECOMPILES: Final = Metric(
    name="train.compile.recompiles",
    unit="{recompile}",
    kind=Kind.COUNTER,
    meaning="Recompilations by the compiler. Growth after warm-up means shapes keep changing.",
    priority="P1",
)
COMPILE_DURATION: Final = Metric(
    name="train.compile.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Time the compiler took.",
    bounds=DURATION_BOUNDS,
    emit=Emit.RANK0,
    priority="P2",
)
PROFILER_CAPTURES: Final = Metric(
    name="train.profiler.captures",
    unit="{capture}",
    kind=Kind.COUNTER,
    meaning="Finished captures by trigger.",
    labels=(PROFILER_TRIGGER, ERROR_TYPE),
)
PROFILER_ACTIVE: Final = Metric(
    name="train.profiler.active",
    unit="{profiler}",
    kind=Kind.UPDOWN,
    meaning="1 while a capture runs; mutes alerts on speed.",
)
PROFILER_CAPTURE_DURATION: Final = Metric(
    name="train.profiler.capture.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning="Time to capture and write.",
    labels=(PROFILER_TRIGGER,),
    bounds=DURATION_BOUNDS,
    priority="P1",
)
PROFILER_CAPTURE_SIZE: Final = Metric(
    name="train.profiler.capture.size",
    unit="By",
    kind=Kind.GAUGE,
    meaning="Bytes of the last capture file.",
    priority="P1",
)
PROFILER_CAPTURE_TIME: Final = Metric(
    name="train.profiler.capture.time",
    unit="s",
    kind=Kind.GAUGE,
    meaning="Unix time when the newest capture ended; its labels say where its trace lies, and what that shows first.",
    labels=(CAPTURE_FILE, CAPTURE_FINDING, PROFILER_TRIGGER, PROFILER_ALERT),
)
TELEMETRY_DROPS: Final = Metric(
    name="train.telemetry.drops",
    unit="{record}",
    kind=Kind.COUNTER,
    meaning="Records that did not arrive, by signal and reason: `rejected` ones lie in spool/rejected, `export_failed` ones wait in the spool. Dashboards are incomplete while it grows.",
    labels=(SIGNAL, DROP_REASON),
)
TELEMETRY_OVERHEAD_TIME: Final = Metric(
    name="train.telemetry.overhead.time",
    unit="s",
    kind=Kind.COUNTER,
    meaning="Seconds that otel_train took of the training thread: estimated from sampled edges.",
)
TELEMETRY_ATTRIBUTE_OVERFLOWS: Final = Metric(
    name="train.telemetry.attribute.overflows",
    unit="{overflow}",
    kind=Kind.COUNTER,
    meaning="Attribute values folded into `_OTHER` because a bound was reached.",
    labels=(OVERFLOWN,),
)
TELEMETRY_STEP_INTERVAL: Final = Metric(
    name="train.telemetry.step_interval",
    unit="{step}",
    kind=Kind.GAUGE,
    meaning="k when only every k-th step is recorded.",
    priority="P1",
    published=False,
)
INSTRUMENTATION_GAPS: Final = Metric(
    name="train.instrumentation.gaps",
    unit="{thing}",
    kind=Kind.UPDOWN,
    meaning="Stages, models and loops that could not be seen or distinguished: their time is in other rows. Above zero, read `unobserved` in summary.json.",
    labels=(GAP_KIND, GAP_REASON),
)
TELEMETRY_FAULTS: Final = Metric(
    name="train.telemetry.faults",
    unit="{fault}",
    kind=Kind.COUNTER,
    meaning="Faults of otel_train itself, contained and logged. After three the part is off.",
    labels=(COMPONENT,),
)
PROBE_TIME: Final = Metric(
    name="train.probe.time", unit="s", kind=Kind.GAUGE, meaning="Unix time when `otel-train doctor` sent it."
)

ALL: Final[tuple[Metric, ...]] = (
    STAGE_DURATION,
    STAGE_DEVICE_DURATION,
    STEP_DURATION,
    STEPS,
    BATCHES,
    SAMPLES,
    TOKENS,
    BATCH_TIME,
    STEP_SKIPS,
    STEP_INDEX,
    EPOCH_INDEX,
    EPOCH_DURATION,
    THROUGHPUT_THEORETICAL,
    MFU_RATIO,
    MODEL_FLOPS,
    ACCELERATOR_FLOPS_LIMIT,
    RUN_INFO,
    RUN_STATUS,
    RUN_TIME,
    RUN_PROGRESS_RATIO,
    RUN_RESTARTS,
    WORLD_SIZE,
    RANKS_EXPECTED,
    HEARTBEAT_TIME,
    STALL_THRESHOLD,
    STALL_EVENTS,
    RANK_TIME,
    HEARTBEAT_STEP,
    LOSS,
    GRADIENT_NORM,
    LEARNING_RATE,
    AMP_SCALE,
    NONFINITE_DETECTIONS,
    METRIC_VALUE,
    LOADER_BATCH_BUILD_DURATION,
    LOADER_START_DURATION,
    LOADER_WORKER_COUNT,
    LOADER_WORKER_EXITS,
    LOADER_QUEUE_SIZE,
    LOADER_QUEUE_LIMIT,
    LOADER_EXHAUSTIONS,
    LOADER_ERRORS,
    PROCESS_MEMORY_USAGE,
    PROCESS_CPU_TIME,
    PROCESS_THREAD_COUNT,
    PROCESS_UNIX_FILE_DESCRIPTOR_COUNT,
    MEMORY_USAGE,
    HOST_MEMORY_USAGE,
    HOST_MEMORY_LIMIT,
    ACCELERATOR_MEMORY_ALLOCATED,
    ACCELERATOR_MEMORY_RESERVED,
    ACCELERATOR_MEMORY_LIMIT,
    ACCELERATOR_MEMORY_ALLOCATED_PEAK,
    ACCELERATOR_MEMORY_RESERVED_PEAK,
    ACCELERATOR_MEMORY_OOMS,
    ACCELERATOR_MEMORY_ALLOC_RETRIES,
    ACCELERATOR_IO,
    HW_GPU_UTILIZATION,
    HW_GPU_MEMORY_USAGE,
    HW_GPU_MEMORY_LIMIT,
    HW_POWER,
    HW_TEMPERATURE,
    CHECKPOINT_DURATION,
    CHECKPOINT_FAILURES,
    CHECKPOINT_LAST_SUCCESS_TIME,
    CHECKPOINT_INTERVAL,
    CHECKPOINT_SIZE,
    EVAL_DURATION,
    STRAGGLER_EXCESS_RATIO,
    RANK_STALL_TIME,
    RANK_WORK_TIME,
    RANKS_REPORTING,
    RANKS_EVENTS,
    COLLECTIVE_WAIT_DURATION,
    COMPILE_RECOMPILES,
    COMPILE_DURATION,
    PROFILER_CAPTURES,
    PROFILER_ACTIVE,
    PROFILER_CAPTURE_DURATION,
    PROFILER_CAPTURE_SIZE,
    PROFILER_CAPTURE_TIME,
    TELEMETRY_DROPS,
    TELEMETRY_OVERHEAD_TIME,
    TELEMETRY_ATTRIBUTE_OVERFLOWS,
    TELEMETRY_STEP_INTERVAL,
    INSTRUMENTATION_GAPS,
    TELEMETRY_FAULTS,
    PROBE_TIME,
)
"""Every metric, in the order of the reference page."""

PUBLISHED: Final = tuple(metric for metric in ALL if metric.published)
"""The metrics of this version; the others are reserved names."""

by_name: Final = {metric.name: metric for metric in ALL}
"""Every metric by its OpenTelemetry name."""


class Attribute(NamedTuple):
    """An attribute of a span or an event.

    Attributes:
        name: OpenTelemetry name, dotted.
        type: ``int``, ``float``, ``str`` or ``bool``.
        meaning: one sentence, with the unit.
    """

    name: str
    type: str
    meaning: str


STEP_NUMBER: Final = Attribute(
    name="train.step.index", type="int", meaning="Step number as the user counts it."
)
EPOCH_NUMBER: Final = Attribute(name="train.epoch.index", type="int", meaning="Pass over the loader, from 0.")
SPAN_STAGE: Final = Attribute(name="train.stage", type="str", meaning="What the training thread was doing.")
SPAN_LOADER: Final = Attribute(name="train.loader", type="str", meaning="Where the batch came from.")
SPAN_PHASE: Final = Attribute(name="train.phase", type="str", meaning="What the batch was for.")
SPAN_RANK: Final = Attribute(name="train.rank", type="int", meaning="The process.")
RUN_ID: Final = Attribute(name="train.run.id", type="str", meaning="The run; survives restarts.")
RUN_ATTEMPT: Final = Attribute(name="train.run.attempt", type="int", meaning="Restart number, from 0.")
BATCH_SIZE: Final = Attribute(name="train.batch.size", type="int", meaning="Samples in the step's batches.")
BATCH_COUNT: Final = Attribute(name="train.batch.count", type="int", meaning="Batches in the step.")
KEEP_REASON: Final = Attribute(
    name="train.keep.reason",
    type="str",
    meaning="Why this step became a trace: warmup, slow, nonfinite, oom, error, profiler or baseline.",
)
STEP_BASELINE: Final = Attribute(
    name="train.step.baseline.duration",
    type="float",
    meaning="Rolling median of step durations at that moment, in seconds.",
)
STEP_PARTIAL: Final = Attribute(
    name="train.step.partial", type="bool", meaning="The step had no update: timed, not counted."
)
TRACE_CLASS: Final = Attribute(
    name="train.trace.class",
    type="str",
    meaning="Kind of trace, for tail sampling: run, step, checkpoint, eval, profiler or stall.",
)
STAGE_SELF_TIME: Final = Attribute(
    name="train.stage.self_time",
    type="float",
    meaning="The stage's share of the step, without stages inside it, in seconds.",
)
STAGE_DEVICE_TIME: Final = Attribute(
    name="train.stage.device.duration",
    type="float",
    meaning="Accelerator time, in seconds; absent when not measured.",
)
MODEL_NAME: Final = Attribute(name="train.model", type="str", meaning="Which of several models.")
STALL_AGE: Final = Attribute(
    name="train.stall.age", type="float", meaning="Time since the last progress, in seconds."
)
STALL_SUSPECT: Final = Attribute(
    name="train.stall.suspect",
    type="bool",
    meaning="`train.rank` is the rank that the others wait for, as found by comparing all ranks.",
)
STRAGGLER_EXCESS: Final = Attribute(
    name="train.straggler.excess",
    type="float",
    meaning="How much longer the rank's own work takes per step than the median rank's, in seconds.",
)
CHECKPOINT_SIZE_BYTES: Final = Attribute(name="train.checkpoint.size", type="int", meaning="Bytes written.")
STEP_FLOPS: Final = Attribute(
    name="train.step.flops", type="int", meaning="Model FLOP of one step of this rank, forward and backward."
)
SPAN_ERROR_TYPE: Final = Attribute(name="error.type", type="str", meaning="Exception class.")
RUN_END_CAUSE: Final = Attribute(
    name="train.run.end.cause",
    type="str",
    meaning="Name of the signal or the exit code that ended the process; killed: it got no signal that it could handle.",
)
SPAN_NONFINITE_KIND: Final = Attribute(
    name="train.nonfinite.kind", type="str", meaning="What was not finite."
)
SPAN_EXHAUSTION_REASON: Final = Attribute(
    name="train.loader.exhaustion.reason", type="str", meaning="Why the loader ended."
)
WORKER_NUMBER: Final = Attribute(
    name="train.loader.worker.id", type="int", meaning="Which worker of the loader, from 0."
)
WORKER_PID: Final = Attribute(name="train.loader.worker.pid", type="int", meaning="The worker's process.")
SPAN_PROFILER_TRIGGER: Final = Attribute(
    name="train.profiler.trigger", type="str", meaning="What armed the capture."
)
SPAN_PROFILER_ALERT: Final = Attribute(
    name="train.profiler.alert", type="str", meaning="Name of the alert that armed the capture."
)
STEP_FIRST: Final = Attribute(name="train.step.first", type="int", meaning="First step of several.")
STEP_LAST: Final = Attribute(name="train.step.last", type="int", meaning="Last step of several.")
PROFILER_FILE: Final = Attribute(
    name="train.profiler.file", type="str", meaning="Path of the trace, on the host of the rank."
)
PROFILER_SIZE: Final = Attribute(name="train.profiler.size", type="int", meaning="Bytes of that file.")
PROFILER_FINDING: Final = Attribute(
    name="train.profiler.finding", type="str", meaning="What the trace shows first, in a sentence."
)
PROFILER_PROBLEM: Final = Attribute(
    name="train.profiler.problem", type="str", meaning="Why a capture is not what was asked for."
)

ATTRIBUTES: Final[tuple[Attribute, ...]] = (
    RUN_ID,
    RUN_ATTEMPT,
    SPAN_RANK,
    STEP_NUMBER,
    EPOCH_NUMBER,
    SPAN_PHASE,
    SPAN_LOADER,
    SPAN_STAGE,
    MODEL_NAME,
    BATCH_COUNT,
    BATCH_SIZE,
    KEEP_REASON,
    STEP_BASELINE,
    STEP_PARTIAL,
    TRACE_CLASS,
    STAGE_SELF_TIME,
    STAGE_DEVICE_TIME,
    STALL_AGE,
    STALL_SUSPECT,
    STRAGGLER_EXCESS,
    CHECKPOINT_SIZE_BYTES,
    STEP_FLOPS,
    SPAN_ERROR_TYPE,
    RUN_END_CAUSE,
    SPAN_NONFINITE_KIND,
    SPAN_EXHAUSTION_REASON,
    WORKER_NUMBER,
    WORKER_PID,
    SPAN_PROFILER_TRIGGER,
    SPAN_PROFILER_ALERT,
    STEP_FIRST,
    STEP_LAST,
    PROFILER_FILE,
    PROFILER_SIZE,
    PROFILER_FINDING,
    PROFILER_PROBLEM,
)
"""Every attribute of spans and events."""


class SpanType(NamedTuple):
    """A kind of span, or of event in a span or in ``events.jsonl``.

    Attributes:
        name: low-cardinality constant; what varies is in the attributes.
        meaning: when it exists and what it covers.
        attributes: what it may carry.
        parent: name of the span above it; "" for a root or an event.
        published: whether this version publishes it; otherwise the name is reserved.
    """

    name: str
    meaning: str
    attributes: tuple[Attribute, ...] = ()
    parent: str = ""
    published: bool = True


_STEP_ATTRIBUTES: Final = (
    STEP_NUMBER,
    EPOCH_NUMBER,
    SPAN_PHASE,
    SPAN_LOADER,
    BATCH_COUNT,
    BATCH_SIZE,
    KEEP_REASON,
    STEP_BASELINE,
    STEP_PARTIAL,
    TRACE_CLASS,
    SPAN_ERROR_TYPE,
)
_STAGE_ATTRIBUTES: Final = (
    SPAN_STAGE,
    SPAN_LOADER,
    MODEL_NAME,
    STAGE_SELF_TIME,
    STAGE_DEVICE_TIME,
    SPAN_ERROR_TYPE,
)

RUN_SPAN: Final = SpanType(
    name="train.run",
    meaning="The start of an attempt; over in milliseconds. Everything else links to it.",
    attributes=(RUN_ID, RUN_ATTEMPT, SPAN_RANK, TRACE_CLASS),
)
RUN_END_SPAN: Final = SpanType(
    name="train.run.end",
    meaning="The end; an error when the process was killed and its launcher wrote this.",
    attributes=(RUN_ID, RUN_ATTEMPT, SPAN_RANK, STEP_NUMBER, TRACE_CLASS, SPAN_ERROR_TYPE),
)
PROBE_SPAN: Final = SpanType(
    name="train.probe", meaning="What `otel-train doctor` sent, to find it again.", attributes=(RUN_ID,)
)
INIT_MODEL_SPAN: Final = SpanType(
    name="train.init.model", meaning="Making the model ready.", parent="train.run", published=False
)
INIT_LOADERS_SPAN: Final = SpanType(
    name="train.init.loaders", meaning="Making the loaders ready.", parent="train.run", published=False
)
STEP_SPAN: Final = SpanType(
    name="train.step",
    meaning="A step worth keeping: warm-up, slow, failed, not finite, captured, or every Nth.",
    attributes=_STEP_ATTRIBUTES,
)
RANK_STEP_SPAN: Final = SpanType(
    name="train.rank_step",
    meaning="The same step as one rank saw it.",
    attributes=(*_STEP_ATTRIBUTES, SPAN_RANK),
    parent="train.step",
)
DATA_SPAN: Final = SpanType(
    name="train.data", meaning="Waiting for a batch.", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step"
)
H2D_SPAN: Final = SpanType(
    name="train.h2d",
    meaning="Moving a batch to the device.",
    attributes=_STAGE_ATTRIBUTES,
    parent="train.rank_step",
)
FORWARD_SPAN: Final = SpanType(
    name="train.forward",
    meaning="Forward through the outermost model.",
    attributes=_STAGE_ATTRIBUTES,
    parent="train.rank_step",
)
BACKWARD_SPAN: Final = SpanType(
    name="train.backward",
    meaning="Backward, recomputation included.",
    attributes=_STAGE_ATTRIBUTES,
    parent="train.rank_step",
)
OPTIMIZER_SPAN: Final = SpanType(
    name="train.optimizer",
    meaning="One update, without a closure's forward and backward.",
    attributes=_STAGE_ATTRIBUTES,
    parent="train.rank_step",
)
STAGE_SPAN: Final = SpanType(
    name="train.stage",
    meaning="A user-defined stage; `train.stage` says which.",
    attributes=_STAGE_ATTRIBUTES,
    parent="train.rank_step",
)
CHECKPOINT_SAVE_SPAN: Final = SpanType(
    name="train.checkpoint.save",
    meaning="Saving, as long as the loop waited for it.",
    attributes=(STEP_NUMBER, CHECKPOINT_SIZE_BYTES, TRACE_CLASS, SPAN_ERROR_TYPE),
)
CHECKPOINT_PERSIST_SPAN: Final = SpanType(
    name="train.checkpoint.persist",
    meaning="The background part of saving.",
    attributes=(STEP_NUMBER, CHECKPOINT_SIZE_BYTES, SPAN_ERROR_TYPE),
    parent="train.checkpoint.save",
    published=False,
)
CHECKPOINT_LOAD_SPAN: Final = SpanType(
    name="train.checkpoint.load",
    meaning="Reading a checkpoint back.",
    attributes=(STEP_NUMBER, TRACE_CLASS, SPAN_ERROR_TYPE),
    published=False,
)
EVAL_SPAN: Final = SpanType(
    name="train.eval",
    meaning="One evaluation pass.",
    attributes=(STEP_NUMBER, SPAN_PHASE, SPAN_LOADER, BATCH_COUNT, TRACE_CLASS, SPAN_ERROR_TYPE),
)
STALL_SPAN: Final = SpanType(
    name="train.stall",
    meaning="No progress for longer than `train.stall.threshold`; sent while the loop still hangs.",
    attributes=(SPAN_RANK, STEP_NUMBER, SPAN_STAGE, SPAN_LOADER, STALL_AGE, STALL_SUSPECT, TRACE_CLASS),
)
PROFILER_CAPTURE_SPAN: Final = SpanType(
    name="train.profiler.capture",
    meaning="One profiler capture; links to the steps inside it.",
    attributes=(
        SPAN_PROFILER_TRIGGER,
        SPAN_PROFILER_ALERT,
        STEP_FIRST,
        STEP_LAST,
        PROFILER_FILE,
        PROFILER_SIZE,
        PROFILER_FINDING,
        PROFILER_PROBLEM,
        TRACE_CLASS,
        SPAN_ERROR_TYPE,
    ),
)

SPANS: Final[tuple[SpanType, ...]] = (
    RUN_SPAN,
    INIT_MODEL_SPAN,
    INIT_LOADERS_SPAN,
    STEP_SPAN,
    RANK_STEP_SPAN,
    DATA_SPAN,
    H2D_SPAN,
    FORWARD_SPAN,
    BACKWARD_SPAN,
    OPTIMIZER_SPAN,
    STAGE_SPAN,
    CHECKPOINT_SAVE_SPAN,
    CHECKPOINT_PERSIST_SPAN,
    CHECKPOINT_LOAD_SPAN,
    EVAL_SPAN,
    STALL_SPAN,
    PROFILER_CAPTURE_SPAN,
    RUN_END_SPAN,
    PROBE_SPAN,
)
"""Every span, in the order a run meets them."""

STAGE_SPANS: Final = {
    "data": DATA_SPAN,
    "h2d": H2D_SPAN,
    "forward": FORWARD_SPAN,
    "backward": BACKWARD_SPAN,
    "optimizer": OPTIMIZER_SPAN,
}
"""The span of each built-in stage; any other stage is a ``STAGE_SPAN``."""

NONFINITE_EVENT: Final = SpanType(
    name="train.nonfinite",
    meaning="A value that must be finite was not.",
    attributes=(STEP_NUMBER, SPAN_NONFINITE_KIND),
)
OOM_EVENT: Final = SpanType(
    name="train.oom", meaning="The device ran out of memory.", attributes=(STEP_NUMBER,), published=False
)
LOADER_EXHAUSTED_EVENT: Final = SpanType(
    name="train.loader.exhausted",
    meaning="A loader came to its end.",
    attributes=(STEP_NUMBER, SPAN_LOADER, SPAN_EXHAUSTION_REASON),
)
LOADER_WORKER_EXIT_EVENT: Final = SpanType(
    name="train.loader.worker.exit",
    meaning="A loader's worker died; SIGKILL is what the kernel's out-of-memory killer sends.",
    attributes=(STEP_NUMBER, SPAN_LOADER, SPAN_ERROR_TYPE, WORKER_NUMBER, WORKER_PID),
)
RECOMPILE_EVENT: Final = SpanType(
    name="train.recompile", meaning="The compiler compiled again.", attributes=(STEP_NUMBER,)
)

RUN_KILLED_EVENT: Final = SpanType(
    name="train.run.killed",
    meaning="The process is gone without an end of its own; its launcher wrote this.",
    attributes=(STEP_NUMBER, SPAN_STAGE, RUN_END_CAUSE),
)
STRAGGLER_EVENT: Final = SpanType(
    name="train.straggler",
    meaning="One rank is slow again and again, and the others wait for it.",
    attributes=(SPAN_RANK, SPAN_STAGE, STRAGGLER_EXCESS, STEP_NUMBER),
)

FLOPS_EVENT: Final = SpanType(
    name="train.flops.count",
    meaning='The FLOP of one step were counted (`flops="auto"`). That step took longer than others.',
    attributes=(STEP_NUMBER, STEP_FLOPS),
)

EVENTS: Final[tuple[SpanType, ...]] = (
    FLOPS_EVENT,
    NONFINITE_EVENT,
    OOM_EVENT,
    LOADER_EXHAUSTED_EVENT,
    LOADER_WORKER_EXIT_EVENT,
    RECOMPILE_EVENT,
    RUN_KILLED_EVENT,
    STRAGGLER_EVENT,
)
"""Every event that otel_train writes itself; user-defined events carry the name you give them."""
