// The headline signals: the state in one sentence, then progress, communication and recovery.
import { el, fill } from "./dom.js";
import * as format from "./format.js";

const TONES = {
  progressing: "good", complete: "good", starting: "info", replaying: "info", restarting: "warn", waiting: "warn",
  skipping: "warn", stopped: "info", stalled: "bad", failed: "bad",
};

const facts = (rows) => el("dl", { class: "facts" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

function meter(kind, share, label) {
  const width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return el("div", { class: `meter ${kind}`, role: "img", "aria-label": label }, el("i", { style: { width } }));
}

function signal(name, value, unit, ...content) {
  return el("div", { class: "signal card" },
    el("h3", {}, name), el("div", { class: "figure" }, value, unit ? el("small", {}, ` ${unit}`) : null), ...content);
}

function progress(run) {
  const { progress: figures } = run.signals;
  const share = figures.steps ? figures.done / figures.steps : 0;
  const advances = ["progressing", "replaying", "skipping"].includes(run.signals.state);
  const stands = ["stalled", "waiting"].includes(run.signals.state);
  return signal("Progress", format.number(figures.steps_per_second), stands ? "steps per second until then" : "steps per second",
    meter("", share, `${format.percent(share)} of the steps are done`),
    facts([
      ["steps done", `${format.integer(figures.done)} of ${format.integer(figures.steps)} (${format.percent(share)})`],
      ...(run.unit === "samples" ? [] : [[run.unit, `${format.count(figures.tokens_per_second)} per second`]]),
      ["samples", `${format.number(figures.samples_per_second)} per second`],
      ["goodput, whole run", `${format.number(figures.goodput)} samples per second`],
      ["time left", advances ? format.seconds(figures.eta_seconds) : "–"],
    ]));
}

function communication(run) {
  const { communication: figures } = run.signals;
  return signal("Exposed communication", format.seconds(figures.exposed_seconds), "per step",
    meter("wait", figures.share, `${format.percent(figures.share)} of the step time`),
    facts([
      ["share of the step time", format.percent(figures.share)],
      ["measured by", figures.source || "–"],
      ["ranks", format.integer(run.size)],
      ["layout", run.layout || "–"],
    ]));
}

function recovery(run) {
  const { recovery: figures, progress: { steps } } = run.signals;
  const none = figures.checkpoint_step === null;
  return signal("Recovery", none ? "none" : format.seconds(figures.checkpoint_age_seconds),
    none ? "no checkpoint yet" : "since the newest checkpoint",
    meter("risk", steps ? figures.steps_at_risk / steps : 0, `${format.steps(figures.steps_at_risk)} of work at risk`),
    facts([
      ["newest checkpoint", none ? "–" : `after ${format.steps(figures.checkpoint_step)}`],
      ["work at risk", `${format.steps(figures.steps_at_risk)}, ${format.seconds(figures.seconds_at_risk)}`],
      ["restarts", format.integer(figures.restarts)],
      ["attempts", format.integer(run.attempts.length)],
    ]));
}

function stateLine(run) {
  const { state, sentence } = run.signals;
  const tone = TONES[state] || "info";
  return el("div", { class: "state" },
    el("span", { class: `badge ${tone}` }, state), el("p", { class: "sentence", "aria-live": "polite" }, sentence));
}

/** Shows the signals of all runs: one below the other, or side by side if there are several. */
export function showSignals(section, runs) {
  const several = runs.length > 1;
  section.className = several ? "several" : "";
  fill(section, runs.map((run) => el("div", { class: several ? "card run-signals" : "run-signals" },
    several ? el("div", { class: "run-name" }, el("span", { class: "swatch", style: { background: `var(--${run.color})` } }),
      el("span", {}, run.name)) : null,
    stateLine(run),
    el("div", { class: "signals" }, progress(run), communication(run), recovery(run)))));
}
