"""The table of all metrics, which endpoint, OTLP, dashboard, alert rules and documentation read. Torch-free.

Names follow the conventions of Prometheus: base units as suffixes, `_total` for counters. Every metric has the label
`run`, the name of the run folder.
"""

from __future__ import annotations

from meshwright.base.history.step_table import RECENT_STEPS
from meshwright.insight.metrics.metric import Metric
from meshwright.insight.metrics.readings import progress, ranks, recovery, rollouts

RECENT = f"mean of the newest {RECENT_STEPS} timed steps"

METRICS = (
    # What the run does, and how far it is.
    Metric(
        "meshwright_run_info", "gauge", "", ("id", *progress.INFO), "progress",
        "Always 1; the labels are the id of the run and what its newest attempt runs on.", progress.info,
    ),
    Metric(
        "meshwright_run_state", "gauge", "", ("state",), "progress",
        "1 for the state that the run is in, 0 for the others.", progress.state,
        "meshwright_run_state$filter == 1",
    ),
    Metric(
        "meshwright_run_alive", "gauge", "", (), "progress",
        "1 while a process of the newest attempt runs.", progress.alive,
    ),
    Metric("meshwright_ranks", "gauge", "", (), "progress", "Ranks of the newest attempt.", progress.ranks),
    Metric(
        "meshwright_completed_steps", "gauge", "", (), "progress",
        "Completed steps of the run; a restart goes back to the newest checkpoint.", progress.completed_steps,
    ),
    Metric("meshwright_planned_steps", "gauge", "", (), "progress", "Steps of the whole run.", progress.planned_steps),
    Metric(
        "meshwright_eta_seconds", "gauge", "seconds", (), "progress",
        "Seconds until the last step at the current rate.", progress.eta,
    ),
    Metric(
        "meshwright_steps_per_second", "gauge", "", (), "progress",
        "Steps per second of wall time, over the newest steps.", progress.steps_per_second,
    ),
    Metric(
        "meshwright_tokens_per_second", "gauge", "", (), "progress",
        "Tokens (targets of a custom model) per second of wall time, over the newest steps.",
        progress.tokens_per_second,
    ),
    Metric(
        "meshwright_samples_per_second", "gauge", "", (), "progress",
        "Samples per second of wall time, over the newest steps.", progress.samples_per_second,
    ),
    Metric(
        "meshwright_goodput_samples_per_second", "gauge", "", (), "progress",
        "Unique samples in the steps that survived, per second of wall time since the run began.",
        progress.goodput_samples_per_second,
    ),
    Metric(
        "meshwright_goodput_ratio", "gauge", "ratio", (), "progress",
        "Share of the wall time of all attempts that was productive.", progress.goodput_ratio,
    ),
    Metric(
        "meshwright_goodput_part_seconds", "gauge", "seconds", ("part",), "progress",
        "The wall time of all attempts, divided by what it was spent on; the parts add up to the wall time. A gauge: "
        "steps that a failure takes back move from productive to lost work.", progress.goodput_parts,
    ),
    Metric(
        "meshwright_steps_total", "counter", "", (), "progress",
        "Steps that were executed, with those that a restart repeated.", progress.executed_steps,
    ),
    Metric(
        "meshwright_tokens_total", "counter", "", (), "progress",
        "Tokens (targets of a custom model) of the executed steps.", progress.executed_tokens,
    ),
    Metric(
        "meshwright_samples_total", "counter", "", (), "progress",
        "Samples of the executed steps.", progress.executed_samples,
    ),
    # Where the time of a step goes.
    Metric(
        "meshwright_step_seconds", "histogram", "seconds", (), "step time",
        "Step time of rank 0.", progress.step_seconds,
        "histogram_quantile(0.95, sum by (run, le) (rate(meshwright_step_seconds_bucket$filter[$window])))",
    ),
    Metric(
        "meshwright_rank_step_seconds", "gauge", "seconds", ("rank",), "step time",
        f"Step time, {RECENT}.", ranks.rank_step_seconds,
    ),
    Metric(
        "meshwright_phase_seconds_total", "counter", "seconds", ("rank", "phase"), "step time",
        "Seconds of a rank in every phase, since its attempt began. Waits for other ranks count as sync, on every "
        "axis; the other phases are the rank's local time.", ranks.phase_seconds,
        "avg by (run, phase) (rate(meshwright_phase_seconds_total$filter[$window]))",
    ),
    Metric(
        "meshwright_mfu_ratio", "gauge", "ratio", (), "step time",
        "Model FLOPs utilization; only for devices whose peak FLOP/s is known.", progress.mfu,
    ),
    Metric(
        "meshwright_loader_wait_seconds", "gauge", "seconds", ("rank",), "step time",
        f"Seconds per step in which the rank waits for its data loader, {RECENT}.", ranks.loader_wait,
    ),
    Metric(
        "meshwright_pipeline_idle_ratio", "gauge", "ratio", ("rank",), "step time",
        f"Share of forward, backward and sync in which a rank of a pipeline waits, {RECENT}.", ranks.pipeline_idle,
    ),
    Metric(
        "meshwright_micro_batches_in_flight", "gauge", "", ("rank",), "step time",
        f"Peak number of micro-batches in flight on a rank of a pipeline, {RECENT}.", ranks.micro_batches_in_flight,
    ),
    # Communication.
    Metric(
        "meshwright_exposed_communication_ratio", "gauge", "ratio", (), "communication",
        f"Share of the step time of rank 0 in which it waits for communication, {RECENT}.", ranks.exposed_ratio,
    ),
    Metric(
        "meshwright_exposed_communication_seconds", "gauge", "seconds", ("rank",), "communication",
        f"Seconds per step in which the rank waits for communication, {RECENT}.", ranks.exposed_seconds,
    ),
    Metric(
        "meshwright_wait_seconds", "gauge", "seconds", ("rank", "phase"), "communication",
        f"The same by the phase in which the rank waits, {RECENT}.", ranks.wait_seconds,
        "avg by (run, phase) (meshwright_wait_seconds$filter)",
    ),
    Metric(
        "meshwright_gradient_buckets", "gauge", "", (), "communication",
        "Buckets of DDP's gradient reduction in the newest step.", ranks.buckets,
    ),
    Metric(
        "meshwright_gradient_bucket_bytes", "gauge", "bytes", (), "communication",
        "Message bytes of DDP's gradient buckets in the newest step.", ranks.bucket_bytes,
    ),
    Metric(
        "meshwright_collective_message_bytes", "gauge", "bytes", ("rank", "axis", "collective"), "communication",
        "Message bytes of the newest step that counted them (count_bytes_every).", ranks.message_bytes,
        "max by (run, axis, collective) (meshwright_collective_message_bytes$filter)",
    ),
    Metric(
        "meshwright_collective_wire_bytes", "gauge", "bytes", ("rank", "axis", "collective"), "communication",
        "Bytes that the rank sends by the ring algorithm, of the newest step that counted them.", ranks.wire_bytes,
        "max by (run, axis, collective) (meshwright_collective_wire_bytes$filter)",
    ),
    # Ranks, memory and experts.
    Metric(
        "meshwright_heartbeat_age_seconds", "gauge", "seconds", ("rank",), "ranks",
        "Seconds since the training thread of a rank made progress; only while the run is alive.",
        ranks.heartbeat_age,
    ),
    Metric(
        "meshwright_heartbeat_step", "gauge", "", ("rank",), "ranks",
        "The step that a rank is in; -1 before the first.", ranks.heartbeat_step,
    ),
    Metric(
        "meshwright_rank_waiting", "gauge", "", ("rank",), "ranks",
        "1 while a rank waits for other ranks in a collective.", ranks.is_waiting,
    ),
    Metric(
        "meshwright_stragglers_total", "counter", "", ("rank",), "ranks",
        "How often a rank was reported as a straggler.", ranks.stragglers,
    ),
    Metric(
        "meshwright_peak_memory_bytes", "gauge", "bytes", ("rank",), "memory",
        "Peak memory of a rank so far: of the CUDA allocator, or of the process on CPU.", ranks.peak_memory,
    ),
    Metric(
        "meshwright_memory_at_peak_bytes", "gauge", "bytes", ("rank", "class"), "memory",
        "Bytes of every memory class at the peak of the newest step that counted them.", ranks.memory_at_peak,
        "max by (run, class) (meshwright_memory_at_peak_bytes$filter)",
    ),
    Metric(
        "meshwright_expert_load_ratio", "gauge", "ratio", ("block",), "experts",
        "Largest load of an expert as a multiple of an even share, in the newest record.", ranks.expert_load,
    ),
    Metric(
        "meshwright_expert_dropped_tokens", "gauge", "", ("block",), "experts",
        "Tokens that the capacity of experts dropped, in the newest record.", ranks.dropped_tokens,
    ),
    # What the model learns, and whether the numbers are sound.
    Metric("meshwright_loss", "gauge", "", (), "numerics", "Training loss of the newest step.", progress.loss),
    Metric(
        "meshwright_evaluation_loss", "gauge", "", (), "numerics",
        "Loss of the newest evaluation.", progress.evaluation_loss,
    ),
    Metric(
        "meshwright_grad_norm", "gauge", "", (), "numerics", "Gradient norm of the newest step.", progress.grad_norm,
    ),
    Metric(
        "meshwright_learning_rate", "gauge", "", (), "numerics",
        "Learning rate of the newest step.", progress.learning_rate,
    ),
    Metric(
        "meshwright_loss_scale", "gauge", "", (), "numerics", "Loss scale of fp16.", progress.loss_scale,
    ),
    Metric(
        "meshwright_gradient_noise_scale_samples", "gauge", "samples", (), "numerics",
        "Simple gradient noise scale; far above the global batch size, a larger batch would help.",
        progress.noise_scale,
    ),
    Metric(
        "meshwright_skipped_steps_total", "counter", "", (), "numerics",
        "Executed steps whose update was skipped because a value was not finite.", progress.skipped_steps,
    ),
    Metric(
        "meshwright_nonfinite_total", "counter", "", (), "numerics",
        "Records of a loss or gradient that is not finite, of all ranks; overflows of fp16 do not count.",
        progress.nonfinite,
    ),
    Metric(
        "meshwright_bad_samples_total", "counter", "", (), "numerics",
        "Samples that were quarantined.", progress.bad_samples,
    ),
    # Reinforcement learning: what the policy learns, and where its rollouts go.
    Metric(
        "meshwright_reward", "gauge", "", (), "rollouts",
        "Mean reward of the rollouts that were scored for the newest step.", rollouts.newest("reward"),
    ),
    Metric(
        "meshwright_reward_deviation", "gauge", "", (), "rollouts",
        "Standard deviation of these rewards.", rollouts.newest("reward_std"),
    ),
    Metric(
        "meshwright_policy_kl", "gauge", "", (), "rollouts",
        "KL divergence of the policy from the reference policy, in the newest step; only if rl.kl is set.",
        rollouts.newest("kl"),
    ),
    Metric(
        "meshwright_policy_entropy", "gauge", "", (), "rollouts",
        "Entropy of the policy per token, in the newest step.", rollouts.newest("entropy"),
    ),
    Metric(
        "meshwright_policy_clipped_ratio", "gauge", "ratio", (), "rollouts",
        "Share of tokens whose probability ratio is clipped, in the newest step.", rollouts.newest("clip_share"),
    ),
    Metric(
        "meshwright_sampler_mismatch", "gauge", "", (), "rollouts",
        "Mean difference between the log-probabilities of the sampler and of the scoring pass, in the newest step.",
        rollouts.newest("mismatch"),
    ),
    Metric(
        "meshwright_rollout_staleness", "gauge", "", (), "rollouts",
        "Steps by which the policies of the rollouts are older than the one that trains on them, mean of the newest "
        "step.", rollouts.newest("staleness"),
    ),
    Metric(
        "meshwright_rollout_max_staleness", "gauge", "", (), "rollouts",
        "The largest staleness of a rollout that any step has trained.", rollouts.max_staleness,
    ),
    Metric(
        "meshwright_rollouts_generated", "gauge", "", (), "rollouts",
        "Rollouts in the log up to the newest step. A gauge: a restart goes back to the newest checkpoint.",
        rollouts.generated,
    ),
    Metric(
        "meshwright_rollouts", "gauge", "", ("fate",), "rollouts",
        "The same by what became of them: trained, in_flight, or the cause for which they were dropped (duplicate, "
        "stale, lost_timeline, no_signal, failed, damaged); they add up to those that were generated.",
        rollouts.rollouts,
    ),
    Metric(
        "meshwright_rollout_tokens", "gauge", "", ("fate",), "rollouts",
        "Generated tokens by what became of their rollouts.", rollouts.tokens,
    ),
    Metric(
        "meshwright_rollout_queue_depth", "gauge", "", (), "rollouts",
        "Rollouts in flight when the batch of the newest step was formed.", rollouts.newest("queue_depth"),
    ),
    Metric(
        "meshwright_generators", "gauge", "", (), "rollouts",
        "Generators that were connected at the newest step.", rollouts.newest("generators"),
    ),
    Metric(
        "meshwright_generator_idle_ratio", "gauge", "ratio", (), "rollouts",
        f"Share of their time in which generators wait for a group that they may generate, over the newest "
        f"{RECENT_STEPS} steps.", rollouts.generator_idle,
    ),
    Metric(
        "meshwright_learner_idle_ratio", "gauge", "ratio", (), "rollouts",
        f"Share of the step time in which the ranks wait for rollouts, over the newest {RECENT_STEPS} steps.",
        rollouts.learner_idle,
    ),
    Metric(
        "meshwright_rollout_problems_total", "counter", "", (), "rollouts",
        "Problems that the rollout service has reported.", rollouts.problems,
    ),
    # What a failure would cost, and what failures did cost.
    Metric(
        "meshwright_checkpoint_age_seconds", "gauge", "seconds", (), "recovery",
        "Age of the newest verified checkpoint.", recovery.checkpoint_age,
    ),
    Metric(
        "meshwright_checkpoint_step", "gauge", "", (), "recovery",
        "Completed steps in the newest verified checkpoint.", recovery.checkpoint_step,
    ),
    Metric(
        "meshwright_steps_at_risk", "gauge", "", (), "recovery",
        "Completed steps that no checkpoint contains.", recovery.steps_at_risk,
    ),
    Metric(
        "meshwright_work_at_risk_seconds", "gauge", "seconds", (), "recovery",
        "Seconds that these steps took.", recovery.seconds_at_risk,
    ),
    Metric(
        "meshwright_restarts_total", "counter", "", (), "recovery",
        "Attempts that followed a failure.", recovery.restarts,
    ),
    Metric(
        "meshwright_checkpoints_total", "counter", "", (), "recovery",
        "Checkpoints that were published.", recovery.published_checkpoints,
    ),
    Metric(
        "meshwright_checkpoint_bytes", "gauge", "bytes", (), "recovery",
        "Bytes of the newest checkpoint.", recovery.checkpoint_bytes,
    ),
    Metric(
        "meshwright_checkpoint_save_seconds", "gauge", "seconds", (), "recovery",
        "Seconds from the begin of the newest save to its publication.", recovery.save_seconds,
    ),
    Metric(
        "meshwright_checkpoint_stall_seconds_total", "counter", "seconds", (), "recovery",
        "Seconds in which the training thread waited for saves.", recovery.stall_seconds,
    ),
    Metric(
        "meshwright_checkpoint_failures_total", "counter", "", (), "recovery",
        "Saves that failed.", recovery.save_failures,
    ),
    Metric("meshwright_hangs_total", "counter", "", (), "recovery", "Hangs that the supervisor found.", recovery.hangs),
    Metric(
        "meshwright_callback_failures_total", "counter", "", (), "recovery",
        "Callbacks that failed.", recovery.callback_failures,
    ),
    Metric(
        "meshwright_lost_events", "gauge", "", (), "recovery",
        "Events that ranks cannot write at the moment, on a full disk for example.", recovery.lost_events,
    ),
    # The host of the exporter.
    Metric(
        "meshwright_host_network_receive_bytes_total", "counter", "bytes", ("interface",), "host",
        "Bytes that an interface of the exporter's host received, for all processes.", ranks.network_received,
    ),
    Metric(
        "meshwright_host_network_transmit_bytes_total", "counter", "bytes", ("interface",), "host",
        "Bytes that an interface of the exporter's host transmitted.", ranks.network_transmitted,
    ),
)  # fmt: skip
"""Every metric, in causal order: what the run does, why, and what protects it."""

SECTIONS = tuple(dict.fromkeys(metric.section for metric in METRICS))
"""The rows of the dashboard, in order."""


def metric_names() -> set[str]:
    """Every name under which a sample of the registry appears."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {metric.name + suffix for metric in METRICS for suffix in suffixes.get(metric.kind, ("",))}
