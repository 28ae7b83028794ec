"""Every metric, span, event and attribute that otel_train publishes. Exporters, tests and reference pages follow it."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple, TypeVar

from otel_train.recording import events

_T = TypeVar("_T")


class Kind(Enum):
    """OpenTelemetry instrument of a metric."""

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
"""Attribute value that stands for all further values once the attribute has ``Label.bound`` values."""

DURATION_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Explicit bucket bounds of durations, in seconds."""

STEP_BOUNDS: Final = tuple(float(f"{10 ** (part / 14):.3g}") for part in range(-46, 26))
"""Explicit bucket bounds of step time in seconds, 0.5 ms to 61 s, each at most 1.19 times the previous: quantiles err by up to 19 %."""

STAGES: Final = (*(stage.name for stage in events.STAGES), "other")
PHASES: Final = events.PHASES
ACTIVITIES: Final = (
    *("init", "compile", "productive", "data_wait", "eval"),
    *("checkpoint", "restart", "stalled", "other", "outside"),
)
SIGNAL_ENDS: Final = ("interrupted", "terminated")
"""Run states after Ctrl-C and after SIGTERM. Exported only by ranks that ended in one, and by later attempts."""
RUN_STATES: Final = (
    *("initializing", "training", "evaluating", "checkpointing"),
    *("stalled", "finished", "failed", *SIGNAL_ENDS),
)

_UNIT_SUFFIXES: Final = {
    "s": "_seconds", "By": "_bytes", "W": "_watts", "Cel": "_celsius",
    "{sample}/s": "_per_second", "{flop}/s": "_per_second",
}  # fmt: skip


# Named tuples, because defining a frozen dataclass takes 0.6 ms at import.
class Label(NamedTuple):
    """An attribute that a metric may carry.

    Attributes:
        name: OpenTelemetry name, dotted.
        bound: most values that one process publishes; further ones become ``_OTHER``.
        meaning: one sentence.
        values: the values that otel_train itself defines.
        open: whether there are further values, from the program or the machine.
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
    """One metric.

    Attributes:
        name: OpenTelemetry name, dotted, without unit.
        unit: UCUM code: ``s``, ``By``, ``1`` for a ratio, ``{step}`` for a count.
        kind: OpenTelemetry instrument.
        meaning: one sentence a person on call can act on.
        labels: the only attributes it may have.
        bounds: explicit bucket bounds in ``unit``, ascending; empty unless a histogram.
        emit: which ranks publish it.
    """

    name: str
    unit: str
    kind: Kind
    meaning: str
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()
    emit: Emit = Emit.ALL

    @property
    def prometheus(self) -> str:
        """Name after the OpenTelemetry to Prometheus translation, without ``_bucket`` and the like."""
        # For unit "1" Prometheus appends "_ratio" to gauges received by OTLP, ``/metrics`` appends nothing. The names of
        # our ratios end in ".ratio", which both keep.
        total = "_total" if self.kind is Kind.COUNTER else ""
        return self.name.replace(".", "_") + _UNIT_SUFFIXES.get(self.unit, "") + total


def _defined(kind: type[_T]) -> tuple[_T, ...]:
    """Returns the constants of this type that the module has defined so far, in order."""
    return tuple(value for value in globals().values() if isinstance(value, kind))


# fmt: off
STAGE: Final = Label("train.stage", 8, values=STAGES, open=True,
    meaning="What the training thread was doing; user-defined stages join the built-in ones.")
LOADER: Final = Label("train.loader", 16, open=True,
    meaning="Name of the loader, as given to `instrument` or found.")
PHASE: Final = Label("train.phase", 4, values=PHASES, meaning="What the batch was for.")
ACTIVITY: Final = Label("train.run.activity", 10, values=ACTIVITIES,
    meaning="Activity of the run; the activities add up to the wall time. `outside`: in no batch, such as between passes or after the loop.")
RUN_STATE: Final = Label("train.run.state", 9, values=RUN_STATES, meaning="State the run can be in.")
SKIP_REASON: Final = Label("train.step.skip.reason", 6, values=("amp_overflow",),
    meaning="Why an optimizer step changed nothing.")
LOSS_NAME: Final = Label("train.loss.name", 8, open=True,
    meaning="Which loss; `loss` unless you log several.")
OPTIMIZER_GROUP: Final = Label("train.optimizer.group", 8, open=True,
    meaning="Parameter group: its `name` where it has one, else its number.")
NONFINITE_KIND: Final = Label("train.nonfinite.kind", 4, values=("loss", "gradient"),
    meaning="What was not finite.")
METRIC_NAME: Final = Label("train.metric.name", 32, open=True, meaning="Name of a user-defined metric.")
WORKER_STATE: Final = Label("train.loader.worker.state", 3, values=("alive", "dead", "expected"),
    meaning="State of a loader's worker processes.")
EXHAUSTION_REASON: Final = Label("train.loader.exhaustion.reason", 4,
    values=("epoch_end", "short", "error", "streaming_end"),
    meaning="Why a loader ended: the end of its data, earlier than `len()` promised, an exception, or the end of a stream of unknown length.")
ERROR_TYPE: Final = Label("error.type", 16, open=True,
    meaning="Exception class or signal; absent when nothing failed.")
CPU_MODE: Final = Label("cpu.mode", 3, values=("user", "system"),
    meaning="Where the processor time was spent.")
MEMORY_COMPONENT: Final = Label("train.memory.component", 6,
    values=("dataset", "cache", "prefetch_queue", "pinned", "workers"),
    meaning="What holds the memory; components are disjoint. `workers`: resident memory that they do not share.")
DEVICE: Final = Label("hw.name", 16, open=True, meaning="The accelerator.")
TRANSFER_DIRECTION: Final = Label("train.transfer.direction", 2, values=("h2d", "d2h"),
    meaning="From host to device, or back.")
CHECKPOINT_OPERATION: Final = Label("train.checkpoint.operation", 4, values=("save",),
    meaning="`save` blocks the loop.")
STATISTIC: Final = Label("train.statistic", 4, values=("min", "median", "p95", "max"),
    meaning="Which statistic over the ranks.")
RANK_EVENT: Final = Label("train.rank.event", 8,
    values=("oom", "loader_worker_exit", "nonfinite", "exception", "drop", "stall"),
    meaning="What happened on some rank.")
RUN_NAME: Final = Label("train.run.name", 1, open=True, meaning="Name of the run, for people.")
TEAM: Final = Label("train.team", 1, open=True,
    meaning="Team that the run belongs to: resource attribute `train.team`, `team` or `service.namespace`.")
OWNER: Final = Label("train.owner", 1, open=True,
    meaning="Person to contact: resource attribute `train.owner` or `owner`.")
JOB: Final = Label("train.job", 1, open=True,
    meaning="The scheduler's job: resource attribute `slurm.job.id`, `k8s.job.name` or `train.job`.")
CLUSTER: Final = Label("train.cluster", 1, open=True,
    meaning="Where it runs: resource attribute `k8s.cluster.name`, `slurm.cluster.name` or `train.cluster`.")
NAMESPACE: Final = Label("train.namespace", 1, open=True,
    meaning="The same within the cluster: resource attribute `k8s.namespace.name`, `slurm.partition` or `train.namespace`.")
PEER_RANK: Final = Label("train.peer.rank", 3, open=True,
    meaning="The rank that the value is about. Rank 0 exports the series, at most three ranks at a time.")
PEER_HOST: Final = Label("train.peer.host", 3, open=True, meaning="Host of `train.peer.rank`.")
PROFILER_TRIGGER: Final = Label("train.profiler.trigger", 5,
    values=("schedule", "on_demand", "slow_step", "alert", "signal"),
    meaning="What requested the capture.")
PROFILER_ALERT: Final = Label("train.profiler.alert", 1, open=True,
    meaning="Name of the alert that requested the capture; absent for other captures. One at a time.")
CAPTURE_FILE: Final = Label("train.profiler.file", 1, open=True,
    meaning="The newest trace of this process, within its run directory.")
CAPTURE_FINDING: Final = Label("train.profiler.finding.name", 13,
    values=("input_bound", "launch_bound", "host_bound", "sync_bound", "exposed_communication", "pageable_copies",
        "no_tensor_cores", "unfused_optimizer", "heavy_op", "memory_growth", "straggler", "no_finding", "nothing_recorded"),
    meaning="Name of the first finding of that trace; absent if it was not analysed. One at a time.")
SIGNAL: Final = Label("train.telemetry.signal", 3, values=("metrics", "spans", "records"),
    meaning="Signal of the record.")
DROP_REASON: Final = Label("train.telemetry.drop.reason", 8,
    values=("queue_full", "serialization", "shutdown", "sampled_out", "overrun", "export_failed", "rejected"),
    meaning="Why a record was not sent at once.")
OVERFLOWN: Final = Label("train.telemetry.attribute", 12, open=True,
    meaning="The attribute whose bound was reached.")
COMPONENT: Final = Label("train.telemetry.component", 16, open=True,
    meaning="Component of otel_train that failed.")
GAP_KIND: Final = Label("train.instrumentation.gaps.kind", 5, values=("stage", "model", "loader", "loop", "flops"),
    meaning="What could not be instrumented.")
GAP_REASON: Final = Label("train.instrumentation.gaps.reason", 4, values=("never_seen", "ambiguous", "unhooked"),
    meaning="Never observed, observed but not distinguished from another one, or observed until its hook was removed.")

STAGE_DURATION: Final = Metric("train.stage.duration", "s", Kind.HISTOGRAM,
    labels=(STAGE, LOADER, PHASE), bounds=DURATION_BOUNDS,
    meaning="Host wall time of one occurrence of a stage. `data` is the time the loop waited in `next(loader)`; long `data` in train steps means starved devices.")
STAGE_DEVICE_DURATION: Final = Metric("train.stage.device.duration", "s", Kind.HISTOGRAM,
    labels=(STAGE, LOADER, PHASE), bounds=DURATION_BOUNDS,
    meaning="Accelerator time of one occurrence of a stage, between two events read later without a sync. Of a sample of whole steps: read means and shares, not sums. Never add it to host time.")
STEP_DURATION: Final = Metric("train.step.duration", "s", Kind.HISTOGRAM, labels=(LOADER, PHASE), bounds=STEP_BOUNDS,
    meaning="Wall time of one step, from ask to ask; the self times of its stages add up to it.")
STEPS: Final = Metric("train.steps", "{step}", Kind.COUNTER, labels=(LOADER, PHASE),
    meaning="Completed steps: optimizer updates in phase train, batches elsewhere. Ranks may differ with uneven inputs: aggregate with max, never sum.")
BATCHES: Final = Metric("train.batches", "{batch}", Kind.COUNTER, labels=(LOADER, PHASE),
    meaning="Batches consumed; more than steps under gradient accumulation.")
SAMPLES: Final = Metric("train.samples", "{sample}", Kind.COUNTER, labels=(LOADER, PHASE), emit=Emit.DP_LEADER,
    meaning="Samples consumed. Only data-parallel leaders count, and where rank 0 alone exports it counts for all of them: the sum is the global number in every profile.")
TOKENS: Final = Metric("train.tokens", "{token}", Kind.COUNTER, labels=(LOADER, PHASE), emit=Emit.DP_LEADER,
    meaning="Tokens consumed, without padding. Counted by the same ranks as samples: the sum is the global number in every profile.")
BATCH_TIME: Final = Metric("train.batch.time", "s", Kind.COUNTER, labels=(LOADER, PHASE), emit=Emit.RANK0,
    meaning="Wall seconds of a loader's own batches, from the ask to the end of the work on them, on rank 0. Samples or batches over it are the loader's rate; over wall time they are throughput. A batch of two loaders counts for both: never sum over loaders.")
STEP_SKIPS: Final = Metric("train.step.skips", "{step}", Kind.COUNTER, labels=(SKIP_REASON,),
    meaning="Optimizer steps that changed nothing, by reason. Steady growth means that the loss scale does not stabilize.")
STEP_INDEX: Final = Metric("train.step.index", "{step}", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Step number as the user counts it; goes on after a resume.")
EPOCH_INDEX: Final = Metric("train.epoch.index", "{epoch}", Kind.GAUGE,
    labels=(LOADER,), emit=Emit.RANK0,
    meaning="Current pass over each loader, from 0.")
THROUGHPUT_THEORETICAL: Final = Metric("train.throughput.theoretical", "{sample}/s", Kind.GAUGE,
    labels=(LOADER,), emit=Emit.RANK0,
    meaning="Upper bound of global samples per second, configured or calibrated without the data stage. The gap to the real rate, over the time of the loader's own batches, is what the loader costs.")
MODEL_FLOPS: Final = Metric("train.model.flops", "{flop}", Kind.COUNTER, emit=Emit.DP_LEADER,
    meaning="Model FLOP executed, without recomputation. Counted by the same ranks as samples: the sum is the global number in every profile.")
ACCELERATOR_FLOPS_LIMIT: Final = Metric("train.accelerator.flops.limit", "{flop}/s", Kind.GAUGE, labels=(DEVICE,),
    meaning="Peak dense FLOP/s of the device: `device_flops`, else BF16 of the data sheet of a device that is known.")
RUN_INFO: Final = Metric("train.run.info", "{run}", Kind.GAUGE,
    labels=(RUN_NAME, TEAM, OWNER, JOB, CLUSTER, NAMESPACE), emit=Emit.RANK0,
    meaning="1; its labels say whose run it is, and where. Alerts on the run carry them.")
RUN_STATUS: Final = Metric("train.run.status", "1", Kind.UPDOWN, labels=(RUN_STATE,),
    meaning="1 for the state the run is in, 0 for all others. `interrupted` (Ctrl-C) and `terminated` (SIGTERM) are sent "
            "once a rank has ended so, and by later attempts.")
RUN_TIME: Final = Metric("train.run.time", "s", Kind.COUNTER, labels=(ACTIVITY,), emit=Emit.RANK0,
    meaning="Wall seconds by activity; the activities add up to the elapsed time. Of this attempt, except `restart`: the time between all attempts so far.")
RUN_PROGRESS_RATIO: Final = Metric("train.run.progress.ratio", "1", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Steps done over steps planned, where the plan is known.")
RUN_RESTARTS: Final = Metric("train.run.restarts", "{restart}", Kind.COUNTER, emit=Emit.RANK0,
    meaning="How often the run was restarted.")
WORLD_SIZE: Final = Metric("train.world.size", "{rank}", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Ranks in the run.")
RANKS_EXPECTED: Final = Metric("train.ranks.expected", "{rank}", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Ranks that should report under the export profile; fewer reporting means some are gone or mute.")
HEARTBEAT_TIME: Final = Metric("train.heartbeat.time", "s", Kind.GAUGE,
    meaning="Unix time of the last progress of any kind (batch, step, checkpoint). It keeps flowing while the loop hangs, so its age is the length of the hang.")
STALL_THRESHOLD: Final = Metric("train.stall.threshold", "s", Kind.GAUGE,
    meaning="Age of the heartbeat from which the run counts as stalled, in the activity that is open now: the longer of `stall_after_s` and 20 median steps in training, up to 6 times `stall_after_s` or 3 median steps, more in evaluations and checkpoints, as they have taken before. At least that of the ranks it waits for. Alerts compare with it.")
STALL_EVENTS: Final = Metric("train.stall.events", "{event}", Kind.COUNTER, labels=(STAGE,),
    meaning="Stalls seen, by the stage the rank was in. In a synchronous hang the rank whose stage differs is the suspect.")
RANK_TIME: Final = Metric("train.rank.time", "s", Kind.COUNTER,
    meaning="Wall seconds since this process began to record. The rate of a counter over the rate of this one is right from the first minute on, and up to the end.")
HEARTBEAT_STEP: Final = Metric("train.heartbeat.step", "{step}", Kind.GAUGE,
    meaning="Step number at the last heartbeat; the lowest rank is behind.")
LOSS: Final = Metric("train.loss", "{loss}", Kind.GAUGE, labels=(LOSS_NAME, PHASE), emit=Emit.RANK0,
    meaning="Last loss that was logged; read later, never forcing a sync.")
GRADIENT_NORM: Final = Metric("train.gradient.norm", "{norm}", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Last global gradient norm that was logged or clipped.")
LEARNING_RATE: Final = Metric("train.learning_rate", "{lr}", Kind.GAUGE, labels=(OPTIMIZER_GROUP,), emit=Emit.RANK0,
    meaning="Learning rate of each parameter group.")
AMP_SCALE: Final = Metric("train.amp.scale", "{scale}", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Loss scale of the gradient scaler.")
NONFINITE_DETECTIONS: Final = Metric("train.nonfinite.detections", "{detection}", Kind.COUNTER,
    labels=(NONFINITE_KIND,),
    meaning="Times a loss or gradient norm that was logged was not finite. More than a few: look at the last good checkpoint.")
METRIC_VALUE: Final = Metric("train.metric.value", "{value}", Kind.GAUGE,
    labels=(METRIC_NAME, PHASE, LOADER), emit=Emit.RANK0,
    meaning="Value logged under a user-defined name.")
LOADER_BATCH_BUILD_DURATION: Final = Metric("train.loader.batch.build.duration", "s", Kind.HISTOGRAM,
    labels=(LOADER,), bounds=DURATION_BOUNDS,
    meaning="Time a worker took to fetch and collate one batch, measured in the worker.")
LOADER_START_DURATION: Final = Metric("train.loader.start.duration", "s", Kind.HISTOGRAM,
    labels=(LOADER,), bounds=DURATION_BOUNDS,
    meaning="Time from the ask for a new pass over a loader to its first batch: making the iterator and its workers, and the first wait. Large and once per epoch: keep the workers.")
LOADER_WORKER_COUNT: Final = Metric("train.loader.worker.count", "{worker}", Kind.UPDOWN, labels=(LOADER, WORKER_STATE),
    meaning="Worker processes of a loader by state; any dead one stops or slows its loader.")
LOADER_WORKER_EXITS: Final = Metric("train.loader.worker.exits", "{exit}", Kind.COUNTER, labels=(LOADER, ERROR_TYPE),
    meaning="Worker processes that ended, by signal or exception.")
LOADER_QUEUE_SIZE: Final = Metric("train.loader.queue.size", "{batch}", Kind.UPDOWN, labels=(LOADER,),
    meaning="Batches ready in the prefetch queue when the loop asked. Near zero means the workers cannot keep up.")
LOADER_QUEUE_LIMIT: Final = Metric("train.loader.queue.limit", "{batch}", Kind.UPDOWN, labels=(LOADER,),
    meaning="Most batches the prefetch queue can hold: workers times prefetch factor.")
LOADER_EXHAUSTIONS: Final = Metric("train.loader.exhaustions", "{exhaustion}", Kind.COUNTER,
    labels=(LOADER, EXHAUSTION_REASON),
    meaning="Times a loader came to its end, by reason.")
LOADER_ERRORS: Final = Metric("train.loader.errors", "{error}", Kind.COUNTER,
    labels=(LOADER, ERROR_TYPE),
    meaning="Exceptions that left `next(loader)`.")
PROCESS_MEMORY_USAGE: Final = Metric("process.memory.usage", "By", Kind.UPDOWN,
    meaning="Resident memory of the training process.")
PROCESS_CPU_TIME: Final = Metric("process.cpu.time", "s", Kind.COUNTER, labels=(CPU_MODE,),
    meaning="Processor seconds of the training process.")
PROCESS_THREAD_COUNT: Final = Metric("process.thread.count", "{thread}", Kind.UPDOWN,
    meaning="Threads of the training process.")
PROCESS_UNIX_FILE_DESCRIPTOR_COUNT: Final = Metric("process.unix.file_descriptor.count", "{file_descriptor}", Kind.UPDOWN,
    meaning="Open file descriptors; steady growth is a leak, often in a loader.")
MEMORY_USAGE: Final = Metric("train.memory.usage", "By", Kind.UPDOWN, labels=(LOADER, MEMORY_COMPONENT),
    meaning="Host memory by component of the input pipeline.")
HOST_MEMORY_USAGE: Final = Metric("train.host.memory.usage", "By", Kind.UPDOWN, emit=Emit.NODE,
    meaning="Memory in use on the host or in the container, without what the page cache would give back.")
HOST_MEMORY_LIMIT: Final = Metric("train.host.memory.limit", "By", Kind.UPDOWN, emit=Emit.NODE,
    meaning="Memory the host or the container allows; at the limit the kernel kills.")
ACCELERATOR_MEMORY_ALLOCATED: Final = Metric("train.accelerator.memory.allocated", "By", Kind.UPDOWN, labels=(DEVICE,),
    meaning="Allocator: bytes in live tensors.")
ACCELERATOR_MEMORY_RESERVED: Final = Metric("train.accelerator.memory.reserved", "By", Kind.UPDOWN, labels=(DEVICE,),
    meaning="Bytes reserved from the driver; the allocated bytes are part of them.")
ACCELERATOR_MEMORY_LIMIT: Final = Metric("train.accelerator.memory.limit", "By", Kind.UPDOWN, labels=(DEVICE,),
    meaning="Device memory that this process may use.")
ACCELERATOR_MEMORY_ALLOCATED_PEAK: Final = Metric("train.accelerator.memory.allocated_peak", "By", Kind.GAUGE,
    labels=(DEVICE,),
    meaning="Most bytes allocated at once since the program last reset its peaks. Never reset by otel_train: the program reads the same value.")
ACCELERATOR_MEMORY_RESERVED_PEAK: Final = Metric("train.accelerator.memory.reserved_peak", "By", Kind.GAUGE,
    labels=(DEVICE,),
    meaning="Most bytes reserved at once since the program last reset its peaks.")
ACCELERATOR_MEMORY_OOMS: Final = Metric("train.accelerator.memory.ooms", "{oom}", Kind.COUNTER, labels=(DEVICE,),
    meaning="Times the allocator ran out of memory.")
ACCELERATOR_MEMORY_ALLOC_RETRIES: Final = Metric("train.accelerator.memory.alloc_retries", "{retry}", Kind.COUNTER,
    labels=(DEVICE,),
    meaning="Allocations that had to flush the cache first: the early warning before running out.")
ACCELERATOR_IO: Final = Metric("train.accelerator.io", "By", Kind.COUNTER,
    labels=(TRANSFER_DIRECTION, DEVICE),
    meaning="Bytes moved between host and device by instrumented transfers.")
HW_GPU_UTILIZATION: Final = Metric("hw.gpu.utilization.ratio", "1", Kind.GAUGE, labels=(DEVICE,),
    meaning="Share of the last sample period in which a kernel ran on the device. By NVML, where no DCGM exporter answers.")
HW_GPU_MEMORY_USAGE: Final = Metric("hw.gpu.memory.usage", "By", Kind.UPDOWN, labels=(DEVICE,),
    meaning="Device memory in use by all processes. By NVML, where no DCGM exporter answers.")
HW_GPU_MEMORY_LIMIT: Final = Metric("hw.gpu.memory.limit", "By", Kind.UPDOWN, labels=(DEVICE,),
    meaning="Device memory there is. By NVML, where no DCGM exporter answers.")
HW_POWER: Final = Metric("hw.power", "W", Kind.GAUGE, labels=(DEVICE,),
    meaning="Power that the device draws. By NVML, where no DCGM exporter answers.")
HW_TEMPERATURE: Final = Metric("hw.temperature", "Cel", Kind.GAUGE, labels=(DEVICE,),
    meaning="Temperature of the device. By NVML, where no DCGM exporter answers.")
CHECKPOINT_DURATION: Final = Metric("train.checkpoint.duration", "s", Kind.HISTOGRAM,
    labels=(CHECKPOINT_OPERATION,), bounds=DURATION_BOUNDS, emit=Emit.RANK0,
    meaning="Time of one checkpoint operation. `save` is what the loop waited for.")
CHECKPOINT_FAILURES: Final = Metric("train.checkpoint.failures", "{failure}", Kind.COUNTER,
    labels=(CHECKPOINT_OPERATION,), emit=Emit.RANK0,
    meaning="Checkpoint operations that failed. Above zero the next crash costs more work.")
CHECKPOINT_LAST_SUCCESS_TIME: Final = Metric("train.checkpoint.last_success.time", "s", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Unix time of the last durable checkpoint of this attempt; the start of the attempt until there is one.")
CHECKPOINT_INTERVAL: Final = Metric("train.checkpoint.interval", "s", Kind.GAUGE, emit=Emit.RANK0,
    meaning="Time between checkpoints, declared or learned. Alerts compare with it.")
EVAL_DURATION: Final = Metric("train.eval.duration", "s", Kind.HISTOGRAM,
    labels=(LOADER,), bounds=DURATION_BOUNDS, emit=Emit.RANK0,
    meaning="One evaluation pass.")
STRAGGLER_EXCESS_RATIO: Final = Metric("train.straggler.excess.ratio", "1", Kind.GAUGE,
    labels=(PEER_RANK, PEER_HOST, STAGE), emit=Emit.RANK0,
    meaning="How much more work of its own, before the barrier, a rank has per step than the median rank, as a ratio of the median. The three ranks with the most, if it costs 5 % of the step, and up to nine that were among them, as long as it does; `train.stage` is where they lose most. 0 once it costs less.")
RANK_STALL_TIME: Final = Metric("train.rank.stall.time", "s", Kind.GAUGE,
    labels=(PEER_RANK, PEER_HOST, STAGE), emit=Emit.RANK0,
    meaning="Seconds without progress, or without a record, of a rank that holds the others up, by the stage it was seen in last; three ranks at most. 0 once it has moved.")
RANK_WORK_TIME: Final = Metric("train.rank.work.time", "s", Kind.GAUGE, labels=(STAGE, STATISTIC), emit=Emit.RANK0,
    meaning="Mean time of a stage per training step, over the ranks.")
RANKS_REPORTING: Final = Metric("train.ranks.reporting", "{rank}", Kind.UPDOWN, emit=Emit.RANK0,
    meaning="Ranks whose last record came in time, and those that have ended by themselves.")
RANKS_EVENTS: Final = Metric("train.ranks.events", "{event}", Kind.COUNTER, labels=(RANK_EVENT,), emit=Emit.RANK0,
    meaning="Events of all ranks, summed, ranks that have ended included.")
COMPILE_RECOMPILES: Final = Metric("train.compile.recompiles", "{recompile}", Kind.COUNTER,
    meaning="Recompilations by the compiler. Growth after warm-up means shapes keep changing.")
COMPILE_DURATION: Final = Metric("train.compile.duration", "s", Kind.HISTOGRAM,
    bounds=DURATION_BOUNDS, emit=Emit.RANK0,
    meaning="Time the compiler took.")
PROFILER_CAPTURES: Final = Metric("train.profiler.captures", "{capture}", Kind.COUNTER,
    labels=(PROFILER_TRIGGER, ERROR_TYPE),
    meaning="Finished captures by trigger.")
PROFILER_ACTIVE: Final = Metric("train.profiler.active", "{profiler}", Kind.UPDOWN,
    meaning="1 while a capture runs; mutes alerts on speed.")
PROFILER_CAPTURE_DURATION: Final = Metric("train.profiler.capture.duration", "s", Kind.HISTOGRAM,
    labels=(PROFILER_TRIGGER,), bounds=DURATION_BOUNDS,
    meaning="Time to capture and write.")
PROFILER_CAPTURE_SIZE: Final = Metric("train.profiler.capture.size", "By", Kind.GAUGE,
    meaning="Bytes of the last capture file.")
PROFILER_CAPTURE_TIME: Final = Metric("train.profiler.capture.time", "s", Kind.GAUGE,
    labels=(CAPTURE_FILE, CAPTURE_FINDING, PROFILER_TRIGGER, PROFILER_ALERT),
    meaning="Unix time when the newest capture ended; its labels say where its trace lies, and what that shows first.")
TELEMETRY_DROPS: Final = Metric("train.telemetry.drops", "{record}", Kind.COUNTER, labels=(SIGNAL, DROP_REASON),
    meaning="Records that were not sent at once, by signal and reason: `export_failed` records wait in the spool and are sent later, `sampled_out` is intended, `rejected` records are kept in spool/rejected, all others are lost.")
TELEMETRY_OVERHEAD_TIME: Final = Metric("train.telemetry.overhead.time", "s", Kind.COUNTER,
    meaning="Seconds that otel_train took of the training thread: estimated from sampled edges.")
TELEMETRY_ATTRIBUTE_OVERFLOWS: Final = Metric("train.telemetry.attribute.overflows", "{overflow}", Kind.COUNTER,
    labels=(OVERFLOWN,),
    meaning="Different attribute values folded into `_OTHER` because a bound was reached; up to 4,096 are counted.")
INSTRUMENTATION_GAPS: Final = Metric("train.instrumentation.gaps", "{thing}", Kind.UPDOWN,
    labels=(GAP_KIND, GAP_REASON),
    meaning="Stages, models, loaders and loops that could not be seen or distinguished: their time is in other rows. Above zero, read `instrumentation_gaps` in summary.json.")
TELEMETRY_FAULTS: Final = Metric("train.telemetry.faults", "{fault}", Kind.COUNTER, labels=(COMPONENT,),
    meaning="Faults of otel_train itself, contained and logged. After three the part is off.")
PROBE_TIME: Final = Metric("train.probe.time", "s", Kind.GAUGE,
    meaning="Unix time when `otel-train doctor` sent it.")
# fmt: on

ALL: Final = _defined(Metric)
"""Every metric, in the order of the reference page."""

LABELS: Final = tuple(dict.fromkeys(label for metric in ALL for label in metric.labels))
"""Every attribute that a metric may carry, in the order of the reference page."""

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


# fmt: off
RUN_ID: Final = Attribute("train.run.id", "str", "The run; survives restarts.")
RUN_ATTEMPT: Final = Attribute("train.run.attempt", "int", "Restart number, from 0.")
SPAN_RANK: Final = Attribute("train.rank", "int", "The process.")
STEP_NUMBER: Final = Attribute("train.step.index", "int", "Step number as the user counts it.")
SPAN_PHASE: Final = Attribute("train.phase", "str", "What the batch was for.")
SPAN_LOADER: Final = Attribute("train.loader", "str", "Where the batch came from.")
SPAN_STAGE: Final = Attribute("train.stage", "str", "What the training thread was doing.")
MODEL_NAME: Final = Attribute("train.model", "str", "Which of several models.")
BATCH_COUNT: Final = Attribute("train.batch.count", "int", "Batches in the evaluation pass.")
BATCH_SIZE: Final = Attribute("train.batch.size", "int", "Samples in the step's batches.")
KEEP_REASON: Final = Attribute("train.keep.reason", "str",
    "Why this step became a trace: warmup, slow, nonfinite, error, profiler or baseline.")
STEP_BASELINE: Final = Attribute("train.step.baseline.duration", "float",
    "Rolling median of step durations at that moment, in seconds.")
TRACE_CLASS: Final = Attribute("train.trace.class", "str",
    "Kind of trace, for tail sampling: run, step, checkpoint, eval, profiler or stall.")
STAGE_DEVICE_TIME: Final = Attribute("train.stage.device.duration", "float",
    "Accelerator time, in seconds; absent when not measured.")
STALL_AGE: Final = Attribute("train.stall.age", "float", "Time since the last progress, in seconds.")
STALL_SUSPECT: Final = Attribute("train.stall.suspect", "bool",
    "`train.rank` is the rank that the others wait for, as found by comparing all ranks.")
STRAGGLER_EXCESS: Final = Attribute("train.straggler.excess", "float",
    "How much longer the rank's own work takes per step than the median rank's, in seconds.")
STEP_FLOPS: Final = Attribute("train.step.flops", "int",
    "Model FLOP of one step of this rank, forward and backward.")
SPAN_ERROR_TYPE: Final = Attribute("error.type", "str",
    "What failed, such as `forward failed`; what a capture lacked, or what ended a run or a worker.")
RUN_END_CAUSE: Final = Attribute("train.run.end.cause", "str",
    "Name of the signal or the exit code that ended the process; `OOM kill`: the kernel, for want of memory.")
SPAN_NONFINITE_KIND: Final = Attribute("train.nonfinite.kind", "str", "What was not finite.")
SPAN_EXHAUSTION_REASON: Final = Attribute("train.loader.exhaustion.reason", "str", "Why the loader ended.")
WORKER_NUMBER: Final = Attribute("train.loader.worker.id", "int", "Which worker of the loader, from 0.")
WORKER_PID: Final = Attribute("train.loader.worker.pid", "int", "The worker's process.")
SPAN_PROFILER_TRIGGER: Final = Attribute("train.profiler.trigger", "str", "What requested the capture.")
SPAN_PROFILER_ALERT: Final = Attribute("train.profiler.alert", "str",
    "Name of the alert that requested the capture.")
STEP_FIRST: Final = Attribute("train.step.first", "int", "First step of several.")
STEP_LAST: Final = Attribute("train.step.last", "int", "Last step of several.")
PROFILER_FILE: Final = Attribute("train.profiler.file", "str", "Path of the trace, on the host of the rank.")
PROFILER_SIZE: Final = Attribute("train.profiler.size", "int", "Bytes of that file.")
PROFILER_FINDING: Final = Attribute("train.profiler.finding", "str",
    "First finding of the trace, as a sentence.")
PROFILER_PROBLEM: Final = Attribute("train.profiler.problem", "str",
    "Why the capture differs from the request.")
# fmt: on

ATTRIBUTES: Final = _defined(Attribute)
"""Every attribute of spans and events."""


class SpanType(NamedTuple):
    """A kind of span, or of event in a span or in ``events.jsonl``.

    Attributes:
        name: low-cardinality constant; varying values are in the attributes.
        meaning: when it exists and what it covers.
        attributes: all attributes that it may have.
        parent: name of the parent span; "" for a root or an event.
    """

    name: str
    meaning: str
    attributes: tuple[Attribute, ...] = ()
    parent: str = ""


# fmt: off
_STEP_ATTRIBUTES: Final = (
    STEP_NUMBER, SPAN_PHASE, SPAN_LOADER, BATCH_SIZE, KEEP_REASON, STEP_BASELINE, TRACE_CLASS,
)
_STAGE_ATTRIBUTES: Final = (SPAN_STAGE, SPAN_LOADER, MODEL_NAME, STAGE_DEVICE_TIME, SPAN_ERROR_TYPE)

RUN_SPAN: Final = SpanType("train.run", attributes=(RUN_ID, RUN_ATTEMPT, SPAN_RANK, TRACE_CLASS),
    meaning="Start of an attempt; lasts milliseconds. All other traces link to it.")
STEP_SPAN: Final = SpanType("train.step", attributes=_STEP_ATTRIBUTES,
    meaning="A sampled step: warm-up, slow, failed, not finite, captured, or every Nth.")
RANK_STEP_SPAN: Final = SpanType("train.rank_step", attributes=(*_STEP_ATTRIBUTES, SPAN_RANK, SPAN_ERROR_TYPE), parent="train.step",
    meaning="The same step as one rank saw it.")
DATA_SPAN: Final = SpanType("train.data", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step",
    meaning="Waiting for a batch.")
H2D_SPAN: Final = SpanType("train.h2d", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step",
    meaning="Moving a batch to the device.")
FORWARD_SPAN: Final = SpanType("train.forward", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step",
    meaning="Forward through the outermost model.")
BACKWARD_SPAN: Final = SpanType("train.backward", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step",
    meaning="Backward, recomputation included.")
OPTIMIZER_SPAN: Final = SpanType("train.optimizer", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step",
    meaning="One update, without a closure's forward and backward.")
STAGE_SPAN: Final = SpanType("train.stage", attributes=_STAGE_ATTRIBUTES, parent="train.rank_step",
    meaning="A user-defined stage; `train.stage` says which.")
CHECKPOINT_SAVE_SPAN: Final = SpanType("train.checkpoint.save",
    attributes=(STEP_NUMBER, TRACE_CLASS, SPAN_ERROR_TYPE),
    meaning="Saving a checkpoint: the time that the loop waited.")
EVAL_SPAN: Final = SpanType("train.eval",
    attributes=(STEP_NUMBER, SPAN_PHASE, SPAN_LOADER, BATCH_COUNT, TRACE_CLASS),
    meaning="One evaluation pass.")
STALL_SPAN: Final = SpanType("train.stall",
    attributes=(SPAN_RANK, STEP_NUMBER, SPAN_STAGE, SPAN_LOADER, STALL_AGE, STALL_SUSPECT, TRACE_CLASS),
    meaning="No progress for longer than `train.stall.threshold`; sent while the loop still hangs.")
PROFILER_CAPTURE_SPAN: Final = SpanType("train.profiler.capture",
    attributes=(SPAN_PROFILER_TRIGGER, SPAN_PROFILER_ALERT, STEP_FIRST, STEP_LAST, PROFILER_FILE, PROFILER_SIZE,
        PROFILER_FINDING, PROFILER_PROBLEM, TRACE_CLASS, SPAN_ERROR_TYPE),
    meaning="One profiler capture; links to the steps inside it.")
RUN_END_SPAN: Final = SpanType("train.run.end",
    attributes=(RUN_ID, RUN_ATTEMPT, SPAN_RANK, STEP_NUMBER, TRACE_CLASS, SPAN_ERROR_TYPE),
    meaning="End of the run. Status error if the run failed; written by the agent if the process was killed.")
PROBE_SPAN: Final = SpanType("train.probe", attributes=(RUN_ID,),
    meaning="Test span of `otel-train doctor`.")
# fmt: on

SPANS: Final = _defined(SpanType)
"""Every span, in the order of the reference page."""

STAGE_SPANS: Final = {
    span.name.removeprefix("train."): span
    for span in (DATA_SPAN, H2D_SPAN, FORWARD_SPAN, BACKWARD_SPAN, OPTIMIZER_SPAN)
}
"""The span of each built-in stage; any other stage is a ``STAGE_SPAN``."""

# fmt: off
FLOPS_EVENT: Final = SpanType("train.flops.count", attributes=(STEP_NUMBER, STEP_FLOPS),
    meaning='The FLOP of one step were counted (`flops="auto"`). That step took longer than others.')
NONFINITE_EVENT: Final = SpanType("train.nonfinite", attributes=(STEP_NUMBER, SPAN_NONFINITE_KIND),
    meaning="A value that must be finite was not.")
LOADER_EXHAUSTED_EVENT: Final = SpanType("train.loader.exhausted",
    attributes=(STEP_NUMBER, SPAN_LOADER, SPAN_EXHAUSTION_REASON),
    meaning="A loader came to its end.")
LOADER_WORKER_EXIT_EVENT: Final = SpanType("train.loader.worker.exit",
    attributes=(STEP_NUMBER, SPAN_LOADER, SPAN_ERROR_TYPE, WORKER_NUMBER, WORKER_PID),
    meaning="A loader's worker died; SIGKILL is what the kernel's out-of-memory killer sends.")
RECOMPILE_EVENT: Final = SpanType("train.recompile", attributes=(STEP_NUMBER,),
    meaning="The compiler compiled again.")
RUN_KILLED_EVENT: Final = SpanType("train.run.killed", attributes=(STEP_NUMBER, SPAN_STAGE, RUN_END_CAUSE),
    meaning="The process was killed; written by the agent.")
STRAGGLER_EVENT: Final = SpanType("train.straggler", attributes=(SPAN_RANK, SPAN_STAGE, STRAGGLER_EXCESS, STEP_NUMBER),
    meaning="One rank was slow in several consecutive windows, and the others wait for it.")
# fmt: on

EVENTS: Final = _defined(SpanType)[len(SPANS) :]
"""Every event that otel_train writes itself; user-defined events carry the name you give them."""
