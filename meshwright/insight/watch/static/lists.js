// Lists of a run: checkpoints, attempts with their incidents, notices, findings, and settings that differ.
import { el, fill, setNote } from "./dom.js";
import * as format from "./format.js";

const OUTCOMES = { running: "good", complete: "good", stopped: "info", failed: "bad", hang: "bad", lost: "warn" };
const STATES = { published: "good", deleted: "", damaged: "bad" };
const BROKEN = ["hang", "crash", "numerics", "replay"];

const badge = (tone, text) => el("span", { class: `badge ${tone || ""}` }, text);

/** A table; the columns are [heading, class]. */
function table(caption, columns, rows) {
  return el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, columns.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, index) => el("td",
      { class: columns[index][1] || "text" }, cell))))));
}

export function showCheckpoints(section, run) {
  const body = section.querySelector(".body");
  const present = run.checkpoints.filter((found) => found.state === "published").length;
  setNote(section, run.checkpoint_count ? `${format.integer(run.checkpoint_count)} published, ${present} of the newest ${run.checkpoints.length} still there` : "");
  if (!run.checkpoints.length) {
    fill(body, el("p", { class: "empty" }, "No checkpoint is published yet: a failure now begins again at the first step."));
    return;
  }
  const rows = [...run.checkpoints].reverse().slice(0, 8).map((found) => [
    format.integer(found.step), format.integer(found.attempt), badge(STATES[found.state], found.state),
    format.clock(found.time), format.bytes(found.bytes), format.seconds(found.stall_seconds), format.seconds(found.seconds),
  ]);
  fill(body, table(run.checkpoints.length > 8 ? "The newest 8" : "Newest first",
    [["after steps", "number"], ["attempt", "number hide-phone"], ["state"], ["published", "time"], ["bytes", "number"],
      ["stall", "number"], ["in total", "number hide-phone"]], rows));
}

/** Text of a record as a sentence: it begins with a capital letter and ends with a full stop. */
function sentence(text) {
  if (!text) return "";
  const begun = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

function incident(attempt) {
  const { incident: found } = attempt;
  const range = attempt.done > attempt.first_step
    ? `steps ${format.integer(attempt.first_step)} to ${format.integer(attempt.done - 1)}` : "no step completed";
  const times = `${format.clock(attempt.started)} to ${attempt.ended === null ? "now" : format.clock(attempt.ended, attempt.started)}`;
  const place = found && found.rank !== null
    ? ` Rank ${found.rank}${found.step !== null ? ` at step ${format.integer(found.step)}` : ""}${found.phase ? `, ${found.phase}` : ""}.` : "";
  const details = found && [found.stack, (found.log_tail || []).join("\n")].filter(Boolean).join("\n\n");
  return el("li", {},
    el("div", { class: "state" }, el("b", {}, `Attempt ${attempt.number}`), badge(OUTCOMES[attempt.outcome], attempt.outcome),
      el("span", { class: "note" }, `${range}, ${times}`)),
    found && found.outcome !== "complete" ? el("p", {}, sentence(found.message), place, found.verdict ? ` Verdict: ${found.verdict}.` : "",
      found.recommendation ? ` Next: ${sentence(found.recommendation)}` : "") : null,
    details ? el("details", {}, el("summary", {}, "Stack and last output"), el("pre", {}, details)) : null);
}

function notice(found) {
  const place = [found.rank < 0 ? null : `rank ${found.rank}`, found.step === null ? null : `step ${format.integer(found.step)}`,
    `attempt ${found.attempt}`, format.clock(found.time), found.count > 1 ? `the newest of ${format.integer(found.count)}` : null].filter(Boolean).join(", ");
  return el("li", {}, el("div", { class: "state" }, badge("warn", found.kind), el("span", { class: "note" }, place)),
    el("p", {}, sentence(found.message)));
}

export function showIncidents(section, run) {
  const body = section.querySelector(".body");
  const failed = run.attempts.filter((attempt) => ["failed", "hang", "lost"].includes(attempt.outcome)).length;
  setNote(section, run.attempts.length ? `${format.integer(run.attempt_count)} ${run.attempt_count === 1 ? "attempt" : "attempts"}, ${failed} ended by a failure` : "");
  if (!run.attempts.length) {
    fill(body, el("p", { class: "empty" }, "No attempt is on record yet."));
    return;
  }
  fill(body, el("ul", { class: "incidents" }, [...run.attempts].reverse().slice(0, 12).map(incident)),
    el("h3", {}, run.notices.length > 12 ? "The newest 12 notices" : "Notices"),
    run.notices.length ? el("ul", { class: "incidents" }, run.notices.slice(0, 12).map(notice)) : el("p", { class: "empty" }, "No notices: no slow rank, failed save, quarantined sample or value that is not finite is on record."));
}

const figureText = (value, unit) => {
  if (unit === "s") return format.seconds(value);
  if (unit === "B") return format.bytes(value);
  if (unit === "share") return format.percent(value);
  return `${format.number(value)}${unit === "count" ? "" : ` ${unit}`}`;
};

function finding(found) {
  const tone = found.cause === "healthy" ? "healthy" : BROKEN.includes(found.cause) ? "broken" : "";
  const facts = found.evidence.map((one) => el("li", {}, el("span", { class: "faint" }, one.figure), el("b", {}, figureText(one.value, one.unit)),
    one.compared === null ? null : el("span", { class: "faint" }, `${one.compared_with || "compared with"} ${figureText(one.compared, one.unit)}`)));
  const kind = found.cause === found.variant || !found.variant ? found.cause : `${found.cause}: ${found.variant}`;
  return el("li", { class: `finding ${tone}` }, el("p", {}, el("b", {}, sentence(found.sentence))),
    el("p", { class: "note" }, found.cause === "healthy" ? `confidence ${found.confidence}`
      : `${kind}, confidence ${found.confidence}${found.share > 0 ? `, ${format.percent(found.share)} of the time ${found.cause === "not judged" ? "is not explained" : "to win"}` : ""}`),
    facts.length ? el("ul", { class: "legend" }, facts) : null,
    found.change.action ? el("p", {}, sentence(found.change.action)) : null,
    found.change.settings.length ? el("pre", {}, found.change.settings.join("\n")) : null,
    found.check ? el("p", { class: "note" }, "Check with ", el("code", {}, found.check)) : null);
}

export function showDiagnosis(section, findings) {
  const body = section.querySelector(".body");
  setNote(section, findings.length > 1 ? "the largest effect first" : "");
  fill(body, findings.length ? el("ul", { class: "findings" }, findings.map(finding))
    : el("p", { class: "empty" }, "The diagnosis begins with the first timed steps."));
}

export function showDifferences(section, runs, differences) {
  section.hidden = runs.length < 2;
  const rows = differences.map(({ key, values }) => [el("code", {}, key), ...values.map((value) => el("code", {}, value ?? "–"))]);
  fill(section.querySelector(".body"), rows.length ? table("", [["setting"], ...runs.map((run) => [run.name])], rows)
    : el("p", { class: "empty" }, "The runs have the same settings."));
}
