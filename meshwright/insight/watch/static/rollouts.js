// The rollouts of a run of reinforcement learning: curves of the objective, the account, and who waits for whom.
import { showCurve, StepChart } from "./charts.js";
import { el, fill, setNote } from "./dom.js";
import * as format from "./format.js";

const FATE_COLORS = {
  trained: "green", "in flight": "sky", no_signal: "gold", failed: "red", stale: "orange", lost_timeline: "plum",
  duplicate: "violet", damaged: "ink",
};
const TITLES = {
  reward: "Reward, mean of a step", kl: "KL divergence from the reference policy", entropy: "Entropy per token",
  staleness: "Staleness in steps, mean of a step", clip_share: "Share of clipped tokens",
};

/** Draws the section; it is hidden if no run that is shown trains on rollouts. */
export class Rollouts {
  constructor(section, options) {
    this.section = section;
    this.facts = el("div", { class: "account", style: { marginBottom: "14px" } });
    this.box = el("div", { class: "charts" });
    section.querySelector(".body").append(this.facts, this.box);
    this.charts = Object.fromEntries(Object.entries(TITLES).map(([name, title]) => [name, new StepChart(this.box, title,
      { ...options(name === "clip_share" ? format.percent : format.number, !["reward", "entropy"].includes(name)), full: name === "reward" })]));
  }

  /** Shows the account of the selected run. */
  showAccount(run) {
    const { rollouts } = run;
    this.section.hidden = !rollouts;
    if (!rollouts) return;
    setNote(this.section, `staleness up to ${rollouts.max_staleness ?? "–"}, bound ${rollouts.staleness_bound ?? "–"}`);
    const { counts } = rollouts;
    if (!counts) {
      fill(this.facts, el("p", { class: "empty" }, "The account begins with the first complete step."));
      return;
    }
    const parts = [["trained", counts.trained], ...Object.entries(counts.dropped), ["in flight", counts.in_flight]];
    const shown = parts.filter(([, [amount]]) => amount > 0);
    const [generated] = counts.generated;
    const text = ([amount, size]) => `${format.integer(amount)} rollouts, ${format.integer(size)} tokens`;
    fill(this.facts,
      el("p", {}, `${text(counts.generated)} generated = ${shown.map(([name, [amount]]) => `${format.integer(amount)} ${name.replace("_", " ")}`).join(" + ")}`),
      el("div", { class: "stack", role: "img", "aria-label": shown.map(([name, amount]) => `${name} ${text(amount)}`).join(", ") },
        shown.map(([name, amount]) => el("i", { title: `${name}: ${text(amount)}`,
          style: { width: `${(amount[0] / (generated || 1)) * 100}%`, background: `var(--${FATE_COLORS[name] || "grey"})` } }))),
      el("ul", { class: "legend" }, shown.map(([name, amount]) => el("li", { title: rollouts.causes[name] },
        el("span", { class: "swatch", style: { background: `var(--${FATE_COLORS[name] || "grey"})` } }),
        el("span", {}, name.replace("_", " ")), el("b", {}, format.integer(amount[0])),
        el("span", { class: "faint" }, `${format.integer(amount[1])} tokens`)))),
      el("ul", { class: "legend" }, [
        ["generators", format.integer(rollouts.generators)],
        ["generators wait for the learner in", `${format.percent(rollouts.generator_idle)} of their time`],
        ["the learner waits for rollouts in", `${format.percent(rollouts.learner_idle)} of the step time`],
      ].map(([name, value]) => el("li", {}, el("span", { class: "faint" }, name), el("b", {}, value)))),
      rollouts.problems.map((problem) => el("p", { class: "note" }, problem)));
  }

  /** Shows the curves of `runs`: {color, name, curves}; a chart without a value is hidden. */
  showCurves(runs, marks) {
    for (const [name, chart] of Object.entries(this.charts)) {
      const present = runs.filter(({ curves }) => curves?.[name]);
      chart.box.hidden = !present.length;
      if (!present.length) continue;
      showCurve(chart, present.map(({ color, name: run, curves }) => ({ ...curves[name], steps: curves.step, color, name: run })), marks);
    }
  }

  reset() {
    for (const chart of Object.values(this.charts)) chart.reset();
  }
}
