"""Faults of the loop around a step: samples, zeroed gradients, evaluation, schedule, seeds, skipped steps, counters."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.core.data.loader import Loader
from meshwright.core.data.stream import Stream
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.trainer import step as step_module
from meshwright.core.trainer.evaluate import Evaluation
from meshwright.core.trainer.expert_balancer import ExpertBalancer
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.resume import ResumeState
from meshwright.core.trainer.step import Step
from tests.prover.seeded_faults import after_init, map_result, wrap
from tests.prover.traced_cases import VARIATION
from tests.prover.user_faults import EVALUATION, EXPERTS, INCOMPLETE, ONE_RANK, REPLICATE, UPDATE, user_fault

LAST_STEPS = "last steps"
ODD_STEPS = (*ONE_RANK, "--steps=301", "--eval.every=50")
WORKERS = (*ONE_RANK, "--data.workers=2")


# Samples.


@user_fault(REPLICATE, "tokens of step 0", "the ranks read the right samples in another order")
def ranks_read_in_reverse_order(patch):
    after_init(
        patch, Loader, lambda self, _s, _t, batch, rank, *_: setattr(self, "data_rank", batch.replicas - 1 - rank)
    )


@user_fault(REPLICATE, "tokens of step 0", "the ranks read the right samples in another order")
def ranks_read_samples_by_turns(patch):
    def wrong(self, first, end):
        for number in range(first, end):
            ids = self.stream.step(number)[self.data_rank :: self.batch.replicas]
            yield from ids.reshape(-1, self.batch.micro)

    patch.setattr(Loader, "_micro_batch_ids", wrong)


@user_fault(ONE_RANK, "tokens of step 2", "samples are not those of the stream")
def evaluation_advances_the_stream(patch):
    def wrong(_, self):
        next(self.batches)

    map_result(patch, Training, "evaluate", wrong)


@user_fault(ONE_RANK, "tokens of step 1", "samples are not those of the stream")
def every_step_starts_one_micro_batch_early(patch):
    def wrong(self, first, end):
        for number in range(first, end):
            start = number * (self.batch.accumulation - 1)
            yield [self.dataset[ids] for ids in list(self._micro_batch_ids(0, end))[start : start + 2]]

    patch.setattr(Loader, "steps", wrong)


@user_fault(WORKERS, "tokens of step 0", "samples")
def workers_deliver_in_the_order_of_completion(patch):
    def wrong(right, self, ids):
        batches = right(self, ids)
        for first in batches:
            second = next(batches, None)
            yield from [first] if second is None else [second, first]

    wrap(patch, Loader, "_load_by_threads", wrong)


@user_fault(ONE_RANK, "tokens of step 297", "samples are not those of the stream", runs=(LAST_STEPS,))
def stream_positions_wrap_after_1024_samples(patch):
    def wrong(right, self, positions):
        return right(self, positions % (1 << 10))

    wrap(patch, Stream, "sample_ids", wrong)


# Zeroed gradients.


@user_fault(ONE_RANK, "gradient of decoder.embedding.weight in step 2", "the gradients of step 1 are not zeroed")
def gradients_are_not_zeroed_before_an_evaluation(patch):
    """The step before an evaluation keeps its gradients."""
    calls = []

    def wrong(right, self, in_place=False):
        calls.append(None)
        if len(calls) != 3:  # the first call ends the warm-up
            right(self, in_place)

    wrap(patch, Optimizer, "zero_grad", wrong)


@user_fault(ONE_RANK, "step 2", "the gradients of step 1 are not zeroed", "after a skipped step", runs=(VARIATION,))
def gradients_are_not_zeroed_after_a_skipped_step(patch):
    finite = []
    wrap(
        patch,
        Optimizer,
        "update",
        lambda right, self, lr, norm, scale, ok: (finite.append(bool(ok)), right(self, lr, norm, scale, ok)),
    )
    wrap(
        patch,
        Optimizer,
        "zero_grad",
        lambda right, self, in_place=False: right(self, in_place) if not finite or finite[-1] else None,
    )


# Evaluation.


@user_fault(EXPERTS, "in step 2", "balance loss", "the first after an evaluation")
def evaluation_leaves_the_model_in_evaluation_mode(patch):
    map_result(patch, Evaluation, "run", lambda result, self, model, *_: (model.module.eval(), result)[1])


@user_fault(
    EXPERTS,
    "router.bias in step 2",
    "the expert loads are not those of the tokens of this step",
    "the first after an evaluation",
)
def evaluation_runs_in_training_mode(patch):
    def wrong(right, self, parallel_model, *rest):
        patch.setattr(type(parallel_model.module), "eval", lambda module: module)
        return right(self, parallel_model, *rest)

    wrap(patch, Evaluation, "run", wrong)


@user_fault(ONE_RANK, "evaluation after step 1", EVALUATION)
def evaluation_reads_training_samples(patch):
    patch.setattr(Stream, "held_out_samples", lambda self, count: self.step(0)[: min(count, 4)])


@user_fault(ONE_RANK, "evaluation after step 1", "or the parameters of another step")
def evaluation_is_of_the_parameters_before_the_step(patch):
    before = {}

    def remember(right, self, *rest):
        before.update({p: p.detach().clone() for p in self.parameters})
        right(self, *rest)

    def wrong(right, self, parallel_model, *rest):
        now = {p: p.detach().clone() for p in before}
        for p, value in before.items():
            p.copy_(value)
        result = right(self, parallel_model, *rest)
        for p, value in now.items():
            p.copy_(value)
        return result

    wrap(patch, Optimizer, "update", remember)
    wrap(patch, Evaluation, "run", torch.no_grad()(wrong))


@user_fault(ODD_STEPS, "evaluation after step 300", "this evaluation is missing", runs=(LAST_STEPS,))
def last_evaluation_is_skipped(patch):
    patch.setattr(Training, "evaluation_is_due", lambda self: self.done % self.config.eval.every == 0)


@user_fault(REPLICATE, "evaluation after step 1", EVALUATION, runs=(VARIATION,))
def evaluation_weighs_every_sample_equally(patch):
    def wrong(right, self, parallel_model, *rest):
        forward = parallel_model.forward_loss

        def mean(tokens, labels, *more):
            valid = (labels != -100).sum(1)
            rows = [forward(tokens[i : i + 1], labels[i : i + 1], *more) / n.clamp(min=1) for i, n in enumerate(valid)]
            return torch.stack(rows).mean() * valid.sum()

        parallel_model.forward_loss = mean
        try:
            return right(self, parallel_model, *rest)
        finally:
            del parallel_model.forward_loss

    wrap(patch, Evaluation, "run", wrong)


# Schedule and seeds.


@user_fault(ONE_RANK, "learning rate of step 0", "the learning-rate schedule")
def schedule_is_one_step_ahead(patch):
    wrap(patch, ResumeState, "learning_rate", lambda right, self, step, steps=None: right(self, step + 1, steps))


@user_fault(ONE_RANK, "learning rate of step 297", "the learning-rate schedule", runs=(LAST_STEPS,))
def schedule_starts_again_with_every_attempt(patch):
    def wrong(right, self):
        rate = self.resume.learning_rate
        self.resume.learning_rate = lambda step, steps=None: rate(step - self.first_step, steps)
        right(self)
        self.resume.learning_rate = rate

    wrap(patch, Training, "run_step", wrong)


@user_fault(ONE_RANK, "learning rate of step 3", "the learning-rate schedule", runs=(VARIATION,))
def skipped_step_does_not_advance_the_schedule(patch):
    skipped = []
    map_result(
        patch, Step, "run", lambda outcome, *_: (skipped.extend([1] * bool(outcome.numbers[3] == 0)), outcome)[1]
    )
    wrap(
        patch,
        ResumeState,
        "learning_rate",
        lambda right, self, step, steps=None: right(self, step - len(skipped), steps),
    )


@user_fault(ONE_RANK, "step 297: the ranks with data coordinate 0 use the random seeds", runs=(LAST_STEPS,))
def seeds_repeat_every_hundred_steps(patch):
    wrap(patch, step_module, "step_seed", lambda right, seed, step, coordinate: right(seed, step % 100, coordinate))


@user_fault(REPLICATE, "step 0: the ranks with data coordinate 1 use the random seeds")
def all_ranks_have_the_same_seed(patch):
    wrap(patch, step_module, "step_seed", lambda right, seed, step, _coordinate: right(seed, step, 0))


# Skipped steps.


def when_skipped(patch, then):
    """Calls `then(optimizer, lr)` in a step whose loss is not finite."""

    def wrong(right, self, lr, norm, scale, finite):
        right(self, lr, norm, scale, finite)
        if not bool(finite):
            with torch.no_grad():
                then(self, lr)

    wrap(patch, Optimizer, "update", wrong)


@user_fault(ONE_RANK, "update of decoder.embedding.weight in step 1", "the step is skipped", runs=(VARIATION,))
def skipped_step_decays_the_weights(patch):
    when_skipped(patch, lambda self, lr: [p.mul_(1 - lr * 0.1) for p in self.local_parameters])


@user_fault(
    ONE_RANK,
    "in step 2",
    "it follows from an optimizer state that is wrong before it",
    "after a skipped step",
    runs=(VARIATION,),
)
def skipped_step_decays_the_first_moment(patch):
    when_skipped(
        patch, lambda self, lr: [state["exp_avg"].mul_(0.9) for state in self.rules[0].optimizer.state.values()]
    )


@user_fault(ONE_RANK, "in step 2", UPDATE, "after a skipped step", runs=(VARIATION,))
def skipped_step_is_counted_in_the_bias_correction(patch):
    when_skipped(patch, lambda self, lr: [state["step"].add_(1) for state in self.rules[0].optimizer.state.values()])


@user_fault(EXPERTS, "router.bias in step 1", "the step is skipped", runs=(VARIATION,))
def skipped_step_updates_the_router_biases(patch):
    wrap(patch, ExpertBalancer, "update_biases", lambda right, self, finite: right(self, torch.ones_like(finite)))


@user_fault(REPLICATE, "token count of step 2", "valid tokens are counted", runs=(VARIATION,))
def tokens_of_a_skipped_step_count_in_the_next(patch):
    kept = [0]

    def wrong(control, self, step, *_):
        if step == 1:
            kept[0] = control.tokens
        return replace(control, tokens=control.tokens + kept[0]) if step == 2 else control

    map_result(patch, Step, "_read_control", wrong)


# Micro-batches.


@user_fault(ONE_RANK, "loss of step 0", "only the reported loss is wrong")
def reported_loss_lacks_the_last_micro_batch(patch):
    steps = []

    def wrong(right, self, micro_batches, hooks):
        scale, calls = hooks.scale_loss, [0]

        def scale_loss(losses):
            calls[0] += 1
            steps[-1].context.reports_loss = calls[0] < len(micro_batches)
            return scale(losses)

        return right(self, micro_batches, replace(hooks, scale_loss=scale_loss))

    after_init(patch, Step, lambda self, *_: steps.append(self))
    wrap(patch, ParallelModel, "forward_backward", wrong)


@user_fault(ONE_RANK, "gradient of", INCOMPLETE, "the micro-batches count unequally", runs=(VARIATION,))
def micro_batches_count_as_many_tokens_each(patch):
    """Each micro-batch is divided by its own tokens; the reported loss is right."""

    def wrong(right, self, micro_batches, hooks):
        total = sum(int((labels != -100).sum()) for _, labels, *_ in micro_batches)
        tokens = iter([int((labels != -100).sum()) for _, labels, *_ in micro_batches])

        def scale_loss(losses):
            mean = hooks.scale_loss(losses)
            return mean * total / len(micro_batches) / max(1, next(tokens))

        return right(self, micro_batches, replace(hooks, scale_loss=scale_loss))

    wrap(patch, ParallelModel, "forward_backward", wrong)
