"""What people who come from another system look for, what they write now, and the tests that prove it.

Rows are numbered per system. tests/contract/test_coming_from.py holds that none is missing, and none without a test.
"""

from __future__ import annotations

from typing import NamedTuple

SYSTEMS = {
    "A": "A trainer that times its data loaders by hooks",
    "B": "A profiler with accumulated averages, for PyTorch and JAX",
    "C": "A Lightning callback around the PyTorch profiler",
    "D": "A stage timer with artifacts, tools and a dashboard",
    "E": "A throughput monitor for data loaders, with Lightning and MLflow",
}
NUMBERS = {"A": 11, "B": 9, "C": 11, "D": 8, "E": 10}
"""Features of each system."""


class Row(NamedTuple):
    """One feature.

    Attributes:
        system: its letter.
        number: of the feature, from 1. A feature may have several rows.
        feature: as people look for it.
        write: what they write now, in Markdown.
        tests: that prove it, as pytest names them.
    """

    system: str
    number: int
    feature: str
    write: str
    tests: tuple[str, ...]


UNIT, INTEGRATION, EXAMPLES, MEASURED = (
    "tests/unit/test_",
    "tests/integration/test_",
    "tests/integration/test_examples.py::test_",
    "tests/contract/test_measured.py::test_",
)

ROWS = (
    Row(
        "A", 1, "One switch turns profiling on (`profile_training`); off, there are no metrics and no cost",
        "call `otel_train.instrument(...)`, or do not; `OTEL_TRAIN_DISABLED=true` switches it off where it is called. "
        "[What that costs](overhead.md)",
        (f"{INTEGRATION}integrity.py::test_switched_off_means_not_there",
         f"{UNIT}hand.py::test_without_a_session_nothing_is_written_and_everything_works",
         f"{MEASURED}switched_off_a_stage_costs_next_to_nothing"),
    ),
    Row(
        "A", 2, "Per loader, in training: time of data fetch, forward, backward, optimizer",
        '`instrument(model, {"code": loader, ...})`; `profile/train/dl_{name}/time_{data,forward,backward,optimizer}_ms` in '
        "your tracker, [all keys](flat-names.md); `train.stage.duration` in Prometheus",
        (f"{UNIT}flat.py::test_stage_times_are_means_since_the_last_log",),
    ),
    Row(
        "A", 3, "Per loader, in validation: time of data fetch and forward",
        "the same; `profile/val/dl_{name}/time_{data,forward}_ms`",
        (f"{UNIT}flat.py::test_phase_eval_is_called_val_and_has_data_and_forward_only",),
    ),
    Row(
        "A", 4, "Approximate batch wait",
        "the same, and exact: `profile/train/dl_{name}/time_batch_wait_ms`",
        (f"{UNIT}flat.py::test_batch_wait_runs_from_the_last_stage_of_the_batch_before_to_the_forward",),
    ),
    Row(
        "A", 5, "Code of your own before and after the forward, or any stage",
        '`handle = session.on("forward", before=..., after=...)`; `session.last_loader_name` and '
        "`session.last_batch_fetch_ms` say there where the batch came from",
        (f"{INTEGRATION}by_hand.py::test_code_around_stages_runs_in_a_real_loop_and_the_weights_are_the_same",
         f"{UNIT}hooks.py::test_one_that_fails_is_said_once_and_off_after_three"),
    ),
    Row(
        "A", 6, "Log every so many steps (`log_every_n_steps`)",
        "`log_every_steps=100` for trackers and the console. Histograms see every step, whatever is logged",
        (f"{UNIT}flat.py::test_stage_times_are_means_since_the_last_log",
         f"{INTEGRATION}session.py::test_both_paths_tell_the_same"),
    ),
    Row(
        "A", 7, "Under DDP only the primary rank logs",
        "nothing: trackers and console are rank 0's. Which ranks export metrics says `export_profile`",
        (f"{UNIT}trackers.py::test_only_rank_0_logs",
         f"{INTEGRATION}profiles.py::test_a_lean_rank_publishes_a_handful_of_series"),
    ),
    Row(
        "A", 8, "Several loaders, sampled by weight, one of which runs out before the others",
        "nothing; [examples/several_loaders.py](../../examples/several_loaders.py). Each end of a loader is counted with its "
        "reason",
        (f"{EXAMPLES}loaders_drawn_by_weight_have_times_of_their_own",
         f"{UNIT}flat.py::test_an_epoch_of_loaders_drawn_by_weight_ends_when_all_have_run_out"),
    ),
    Row(
        "A", 9, "Names of loaders are made safe for metric keys",
        "nothing: letters, digits and `_-.` stay; two names that would become one get a suffix and a warning",
        (f"{UNIT}flat.py::test_names_are_made_safe_and_stay_apart",),
    ),
    Row(
        "A", 10, "Data fetch timed on the CPU; CUDA synchronisation as an option",
        '`cuda_timing="events"` is the default and waits for nothing; `cuda_timing="sync"` waits at every edge. '
        "[Two clocks](../explanation/two-clocks.md)",
        (f"{UNIT}device_time.py::test_in_sync_mode_host_time_is_device_time",
         f"{UNIT}device_time.py::test_the_device_waits_for_data_only_when_it_has_nothing_left_to_do"),
    ),
    Row(
        "A", 11, "A benchmark of the overhead, in steps per second",
        "`make bench` writes [what watching costs](overhead.md); live: `train.telemetry.overhead.time`, and the last lines "
        "of the card",
        (f"{UNIT}benchmarks.py::test_percent_more_is_relative_to_the_bare_loop",
         f"{UNIT}benchmarks.py::test_a_missed_budget_stands_out_on_the_page",
         f"{UNIT}console.py::test_the_card_looks_as_it_was_approved"),
    ),
    Row(
        "B", 1, "Profiling as an option of the training function, PyTorch (`enable_profiling`)",
        "`if enable_profiling: otel_train.instrument(model, loaders)` at its top",
        (f"{EXAMPLES}operations_arrive_in_wandb_beside_the_rows_of_the_program",
         f"{INTEGRATION}integrity.py::test_trained_weights_are_the_same_bit_for_bit"),
    ),
    Row(
        "B", 1, "The same, JAX",
        "`instrument(loaders=...)` at its top, and `otel_train.jax.make_step` around the step; torch is not needed. "
        "[JAX](../howto/jax.md)",
        (f"{INTEGRATION}jax.py::test_a_session_needs_no_torch",
         f"{INTEGRATION}jax.py::test_an_equinox_loop_is_counted_and_its_weights_are_the_same_without_us"),
    ),
    Row(
        "B", 2, "Average, total and count of every operation",
        "`profiling/{operation}_{avg_time,total_time,count}` in seconds; `otel_train.summary()`, the card, `summary.json`",
        (f"{UNIT}flat.py::test_operations_are_seconds_since_the_start",
         f"{UNIT}figures.py::test_a_summary_holds_the_figures_by_name"),
    ),
    Row(
        "B", 3, "The operations `data_batch_production`, `loss_fn_computation`, `make_step_total`, `training_step`, and your own",
        "found by themselves, from the stages; your own: `otel_train.stage(...)`. [What each means](flat-names.md)",
        (f"{UNIT}flat.py::test_operations_are_seconds_since_the_start",
         f"{UNIT}flat.py::test_what_a_closure_computes_is_not_counted_twice",
         f"{EXAMPLES}operations_arrive_in_wandb_beside_the_rows_of_the_program"),
    ),
    Row(
        "B", 4, "One profiler for the process: `get_profiler`, `reset`, `get_summary`",
        "`otel_train.current()`, `otel_train.reset_window()`, `otel_train.summary()`",
        (f"{INTEGRATION}session.py::test_a_window_holds_what_came_since_it_was_reset",
         f"{UNIT}flat.py::test_a_reset_begins_the_totals_anew"),
    ),
    Row(
        "B", 4, "`start_timer` and `end_timer`",
        "`token = otel_train.begin(name)` and `otel_train.end(token)`: they may overlap, and end in another thread",
        (f"{UNIT}operations.py::test_operations_may_overlap",
         f"{UNIT}operations.py::test_a_token_may_end_in_another_thread",
         f"{UNIT}operations.py::test_a_token_that_has_ended_is_said_once_and_counted"),
    ),
    Row(
        "B", 5, "A decorator for any function",
        '`@otel_train.stage("name")`, also on methods, generators and `async` functions; or `with otel_train.stage("name"):`',
        (f"{UNIT}hand.py::test_a_function_stays_what_it_is",
         f"{UNIT}hand.py::test_a_generator_counts_only_while_it_runs",
         f"{UNIT}hand.py::test_a_coroutine_counts_only_while_it_runs"),
    ),
    Row(
        "B", 6, "Wrap any data loader",
        "`otel_train.watch(iterable, name=...)`; a `DataLoader` needs no wrapping",
        (f"{INTEGRATION}session.py::test_any_iterable_is_watched_by_hand",
         f"{INTEGRATION}integrity.py::test_a_loader_stays_what_it_is"),
    ),
    Row(
        "B", 7, "Wrap a JAX loss function, or a `make_step`",
        '`otel_train.jax.stage(fn, "loss")`, `otel_train.jax.make_step(fn)`: waited for outside of traced code, compiling told '
        "apart, results unchanged",
        (f"{INTEGRATION}jax.py::test_results_are_the_functions_own_to_the_bit",
         f"{INTEGRATION}jax.py::test_calls_that_compute_are_counted_and_calls_that_are_traced_are_not",
         f"{INTEGRATION}jax.py::test_a_timed_call_returns_when_its_result_is_there",
         f"{INTEGRATION}jax.py::test_steps_are_counted_and_compiling_is_told_apart"),
    ),
    Row(
        "B", 8, "Log to the console every so many steps",
        '`console_blocks=["profiling"]` prints `--- Profiling Metrics (Step 100) ---` as before',
        (f"{UNIT}trackers.py::test_blocks_read_as_they_always_have",),
    ),
    Row(
        "B", 8, "Log to W&B under the prefix `profiling/`",
        "nothing where the program opens a run; [W&B](../howto/wandb.md)",
        (f"{INTEGRATION}trackers.py::test_rows_in_wandb_are_as_many_and_numbered_as_without_us",
         f"{EXAMPLES}operations_arrive_in_wandb_beside_the_rows_of_the_program"),
    ),
    Row(
        "B", 9, "Guidance from the figures to the fix (workers, pinned memory, mixed precision)",
        "the verdict on the card, and findings of a capture; [from figure to fix](../howto/from-figure-to-fix.md)",
        (f"{UNIT}bottleneck_rules.py::test_the_advice_fits_the_loader",
         f"{UNIT}trace_findings.py::test_a_rule_accuses_the_guilty_and_spares_the_innocent",
         f"{UNIT}bottleneck_device.py::test_a_call_that_is_mostly_dispatch_wants_a_larger_batch"),
    ),
    Row(
        "C", 1, "A Lightning callback, configured by Hydra's `_target_`",
        "`_target_: otel_train.integrations.lightning.ProfilerCallback`, with the keywords you have; "
        "`OtelTrainCallback` for everything else; [Lightning](../howto/lightning.md)",
        (f"{INTEGRATION}lightning_callbacks.py::test_the_chosen_epochs_leave_a_trace_each",
         f"{INTEGRATION}lightning_callbacks.py::test_a_way_of_use_is_counted_right",
         f"{INTEGRATION}lightning_callbacks.py::test_two_processes_are_two_ranks_of_one_run"),
    ),
    Row(
        "C", 2, "Chosen epochs, `profile_steps`, `warmup_steps`, wait and skip",
        "the same keywords of `ProfilerCallback`: 10 steps are skipped, 5 waited for; without Lightning "
        '`capture_epochs="1,5"`, `capture_steps=100`, `capture_warmup=5`',
        (f"{INTEGRATION}lightning_callbacks.py::test_the_chosen_epochs_leave_a_trace_each",
         f"{INTEGRATION}lightning_callbacks.py::test_captures_of_epochs_are_the_run_s_captures",
         f"{UNIT}integrations.py::test_an_epoch_that_is_none_is_refused",
         f"{INTEGRATION}capture.py::test_chosen_epochs_give_their_files_and_no_others",
         f"{UNIT}gate.py::test_warm_up_and_wait_are_steps_before_the_first"),
    ),
    Row(
        "C", 3, "Activities, shapes, stacks, memory; without CUDA the CPU is recorded, with a word",
        '`capture_activities="cpu,cuda"`, `capture_shapes=True`, `capture_stacks=True`, `capture_memory=True`',
        (f"{INTEGRATION}capture_options.py::test_shapes_stacks_and_memory_are_recorded_and_a_device_that_is_not_there_is_said",),
    ),
    Row(
        "C", 4, "A Chrome trace per epoch in a folder, as `epoch_N.json`",
        '`capture_output_dir="traces"`, `capture_every_epochs=1`; else `captures/epoch_<n>-step_<m>-rank<r>.json.gz` in the run '
        "directory. Perfetto and chrome://tracing read both",
        (f"{UNIT}desk.py::test_plain_traces_go_where_the_user_wants_them",
         f"{UNIT}desk.py::test_a_schedule_by_epochs_takes_the_first_steps_of_each"),
    ),
    Row(
        "C", 5, "The slowest CPU operations and CUDA kernels with time and share, on the console",
        'printed after each capture (`capture_top`), as `[Profiler] ...` with `console_blocks=["profiler"]`; '
        "`otel-train analyze TRACE` at any time",
        (f"{UNIT}analyze_command.py::test_it_says_what_a_trace_says",
         f"{UNIT}capture_told.py::test_the_profiler_block_reads_as_it_always_has",
         f"{INTEGRATION}real_traces.py::test_self_time_of_every_operator_is_that_of_the_profiler"),
    ),
    Row(
        "C", 6, "Peaks of memory (time, bytes), share of data loading, of forward, backward and optimizer",
        "`otel-train analyze TRACE`; `--json` for all of it",
        (f"{UNIT}analysis.py::test_memory_has_a_peak_and_a_timeline",
         f"{UNIT}analysis.py::test_stages_add_up_to_the_step",
         f"{UNIT}analysis.py::test_waiting_for_any_loader_is_waiting_for_data"),
    ),
    Row(
        "C", 7, "`analyze_trace(path)` with `top_cpu_ops`, `top_cuda_ops`, `memory_peaks`, `dataloader_time_pct`",
        "`otel_train.analyze.trace_summary(path)`: these keys, and more",
        (f"{UNIT}analysis.py::test_the_summary_has_the_keys_that_were_promised",),
    ),
    Row(
        "C", 8, "Bottlenecks by name, each with a recommendation",
        "findings, in `otel-train analyze` and in the capture's record; [their rules](analysis.md)",
        (f"{UNIT}trace_findings.py::test_a_rule_accuses_the_guilty_and_spares_the_innocent",
         f"{UNIT}trace_findings.py::test_a_healthy_loop_is_told_so"),
    ),
    Row(
        "C", 9, "Comparison across epochs; export to TensorBoard; memory over time",
        '`otel-train compare TRACE TRACE`; `capture_tensorboard="folder"`; `otel-train report` draws memory over time',
        (f"{UNIT}compare.py::test_traces_are_compared_step_by_step",
         f"{INTEGRATION}capture_evidence.py::test_two_captures_of_a_run_can_be_compared",
         f"{UNIT}desk.py::test_tensorboard_finds_a_copy",
         f"{UNIT}report.py::test_the_page_has_every_section"),
    ),
    Row(
        "C", 10, "Off by default, and no cost when off",
        "nothing is recorded until you, an alert or a schedule asks for it",
        (f"{UNIT}gate.py::test_nothing_stands_in_the_way_before_and_after",
         f"{INTEGRATION}capture.py::test_captures_can_be_off"),
    ),
    Row(
        "C", 10, "Less than 5 % slower while it records",
        "nothing, where operations are large; in steps of thousands of small ones `torch.profiler` alone costs more: "
        "[captures](overhead.md#captures)",
        (f"{MEASURED}a_capture_of_large_operations_makes_a_step_less_than_five_percent_slower",
         f"{MEASURED}the_page_shows_what_captures_cost"),
    ),
    Row(
        "C", 11, "It never crashes training, and traces stay small",
        "`capture_max_bytes` per trace, `capture_kept` traces, `capture_max_s` seconds",
        (f"{INTEGRATION}capture_faults.py::test_a_full_disk_costs_the_capture_and_nothing_else",
         f"{UNIT}desk.py::test_a_trace_that_is_too_large_is_not_kept",
         f"{UNIT}desk.py::test_old_captures_make_room_and_pinned_ones_stay"),
    ),
    Row(
        "D", 1, "`train.py --profiler on` or `off`",
        "`otel-train run train.py`, or without it; the demo takes `otel-train demo --profiler on`",
        (f"{INTEGRATION}artifacts_of_runs.py::test_the_demo_trains_the_epochs_it_is_told_to",
         f"{INTEGRATION}run_training.py::test_output_and_weights_are_those_of_a_bare_run"),
    ),
    Row(
        "D", 2, "Artifacts of a run: `config.json`, `metrics.json`, `profiler_summary.json`, `stage_times.json`, `op_stats.csv`, "
        "`trace.json`",
        "`artifacts=True` writes them at the end, `otel-train artifacts RUN` later; [their contents](artifacts.md)",
        (f"{INTEGRATION}artifacts_of_runs.py::test_a_training_that_ends_leaves_its_artifacts",
         f"{INTEGRATION}artifacts_of_runs.py::test_after_sigkill_the_launcher_writes_them_up_to_the_last_step",
         f"{UNIT}artifacts.py::test_every_document_is_as_its_schema_says"),
    ),
    Row(
        "D", 3, "A stage timer: stages, averages, times per step and per epoch",
        'stages by themselves and `otel_train.stage("name")`; `stage_times.json` has totals, `per_step` and `per_epoch`',
        (f"{UNIT}artifacts.py::test_steps_epochs_and_totals_are_those_of_the_flight_file",
         f"{EXAMPLES}a_run_leaves_artifacts_that_agree"),
    ),
    Row(
        "D", 4, "Hooks and a registry for profilers of your own",
        "a package with the entry point `otel_train.exporters`; [how](../howto/write-an-exporter.md)",
        (f"{EXAMPLES}an_exporter_of_another_package_is_found_and_fed",
         f"{UNIT}brought.py::test_an_installed_exporter_gets_every_batch_in_order_and_is_closed"),
    ),
    Row(
        "D", 5, "A script that profiles N steps into a folder (`run_profile.py`)",
        "`otel-train profile --steps 50 --output-dir DIR -- train.py`; with a RUN it arms that live run",
        (f"{INTEGRATION}artifacts_of_runs.py::test_a_program_is_profiled_without_a_line_in_it",
         f"{INTEGRATION}capture.py::test_the_command_captures_a_live_run_and_says_where_it_is"),
    ),
    Row(
        "D", 5, "A script that checks such a folder (`check_profile.py`)",
        "`otel-train check DIR --analysis --report`; exit code 1 where something is missing or does not agree",
        (f"{UNIT}artifacts.py::test_what_was_tampered_with_is_named_by_its_file",
         f"{EXAMPLES}a_run_leaves_artifacts_that_agree"),
    ),
    Row(
        "D", 6, "Make targets `profile`, `profile-check`, `profile-train`, `profile-dashboard`, `profile-clean`",
        "`make profile`, `make profile-check`, `make profile-train`, `make profile-dashboard`, `make profile-clean`",
        (f"{INTEGRATION}artifacts_of_runs.py::test_profile_clean_takes_away_what_the_targets_wrote_and_nothing_else",),
    ),
    Row(
        "D", 7, "A dashboard: overview, timing, memory, artifacts; live; alerts and warnings",
        "`otel-train ui`, or Grafana: `otel-train stack up`, [dashboards](../howto/dashboards.md)",
        ("tests/stack/test_ui_in_browser.py::test_a_run_is_followed_while_it_trains",
         "tests/stack/test_ui_in_browser.py::test_tabs_work_by_keys_alone",
         f"{UNIT}ui.py::test_every_tab_has_the_verdicts",
         f"{UNIT}ui.py::test_a_tab_has_its_sections_and_no_empty_ones"),
    ),
    Row(
        "D", 8, "Training goes on when the profiler fails",
        "nothing: each part of ours has a guard, and is off after three faults",
        (f"{UNIT}guard.py::test_a_fault_of_ours_does_not_come_out",
         f"{INTEGRATION}chaos.py::test_a_broken_exporter_is_switched_off_and_training_goes_on",
         f"{INTEGRATION}chaos.py::test_a_hook_that_is_fed_nonsense_raises_nothing_into_the_loop"),
    ),
    Row(
        "E", 1, "Samples and batches per second, per epoch",
        "`samples_per_second`, `batches_per_second`; several loaders also `dl_{name}/samples_per_second`",
        (f"{UNIT}flat.py::test_throughput_is_told_once_per_pass_of_the_training_loader",
         f"{UNIT}flat.py::test_several_training_loaders_have_keys_of_their_own",
         f"{EXAMPLES}throughput_of_every_epoch_is_printed_and_in_mlflow"),
    ),
    Row(
        "E", 2, "Batch load time: average, p50, p95, p99",
        "`batch_load_time_ms_{avg,p50,p95,p99}`",
        (f"{UNIT}flat.py::test_throughput_is_told_once_per_pass_of_the_training_loader",),
    ),
    Row(
        "E", 3, "Batch transform time, the work in the workers: average, p50, p95, p99",
        "`batch_transform_time_ms_{avg,p50,p95,p99}`, measured inside the worker",
        (f"{INTEGRATION}inside_the_loader.py::test_build_time_is_what_the_dataset_takes",
         f"{INTEGRATION}inside_the_loader.py::test_every_batch_of_every_worker_is_timed",
         f"{UNIT}flat.py::test_throughput_is_told_once_per_pass_of_the_training_loader"),
    ),
    Row(
        "E", 4, "Memory of the dataset and of caches, peak in the epoch",
        "`memory_dataset_mb` (an estimate), `memory_cache_mb` after `session.cache(name, size=...)`, `memory_peak_mb`, "
        "`memory_peak_device_mb`",
        (f"{INTEGRATION}memory_of_epochs.py::test_a_buffer_held_for_half_a_second_is_in_the_peak_of_its_epoch",
         f"{UNIT}dataset_size.py::test_the_estimate_is_close_to_what_is_held",
         f"{UNIT}cache_sizes.py::test_caches_say_how_large_they_are",
         f"{UNIT}memories.py::test_figures_are_in_mib_under_their_flat_names"),
    ),
    Row(
        "E", 5, "Efficiency: actual against theoretical throughput",
        "`throughput_efficiency`, 0 to 1, from the run's own records; absent until it is known",
        (f"{UNIT}flat.py::test_efficiency_compares_with_the_slower_of_loading_and_computing_alone",
         f"{UNIT}flat.py::test_efficiency_is_absent_until_build_times_are_known"),
    ),
    Row(
        "E", 6, "A block on the console per epoch (`[Throughput] Epoch 1:`)",
        '`console_blocks=["throughput"]`',
        (f"{UNIT}trackers.py::test_blocks_read_as_they_always_have",
         f"{EXAMPLES}throughput_of_every_epoch_is_printed_and_in_mlflow"),
    ),
    Row(
        "E", 7, "MLflow",
        "nothing where the program has a run; [MLflow](../howto/mlflow.md)",
        (f"{INTEGRATION}trackers.py::test_metrics_in_mlflow_go_to_the_run_of_the_training_thread",
         f"{EXAMPLES}throughput_of_every_epoch_is_printed_and_in_mlflow"),
    ),
    Row(
        "E", 8, "A Lightning callback with switches for memory and timing, and an interval in epochs",
        "`_target_: otel_train.integrations.lightning.ThroughputMonitorCallback`, with the keywords you have; "
        "elsewhere `throughput_parts`",
        (f"{INTEGRATION}lightning_callbacks.py::test_every_epoch_of_the_trainer_prints_one_block",
         f"{UNIT}integrations.py::test_parts_of_an_epoch_s_throughput_can_be_left_out"),
    ),
    Row(
        "E", 8, "On and off by configuration; an interval in epochs",
        "[settings](settings.md) in code, environment, YAML or `pyproject.toml`; `log_every_epochs`",
        (f"{UNIT}flat.py::test_every_other_epoch_is_every_other_epoch",
         f"{UNIT}sources.py::test_code_wins_over_the_environment_over_yaml_over_pyproject_over_defaults"),
    ),
    Row(
        "E", 9, "Less than 1 %, and less than 1 ms per batch",
        "nothing; steps of 50 ms are meant. [What watching costs](overhead.md) has every figure, and the tighter budgets that "
        "are missed",
        (f"{MEASURED}a_batch_costs_less_than_a_millisecond_and_a_step_of_50_ms_less_than_one_percent",
         f"{MEASURED}the_page_shows_the_figures_that_were_measured"),
    ),
    Row(
        "E", 10, "A monitor that fails warns, and never crashes",
        "nothing",
        (f"{UNIT}trackers.py::test_a_tracker_that_raises_is_off_after_three",
         f"{INTEGRATION}trackers.py::test_training_goes_on_beside_trackers_that_hang_and_raise"),
    ),
)  # fmt: skip
