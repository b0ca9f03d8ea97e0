// Stacked bars with legends: the goodput account, and the peak memory by class.
import { el, fill, setNote } from "./dom.js";
import * as format from "./format.js";

export const PART_COLORS = {
  productive: "green", data: "gold", "exposed communication": "orange", bubble: "violet", straggler: "red",
  checkpoint: "teal", evaluation: "sky", callback: "lime", bookkeeping: "brown", start: "slate", compile: "blue",
  skipped: "warn", "lost work": "plum", stalled: "ink", restart: "pink", idle: "grey", end: "sand",
};
const MEMORY_COLORS = {
  parameter: "blue", gradient: "teal", optimizer: "violet", buffer: "brown", activation: "green",
  communication: "orange", temporary: "grey",
};
const MIN_SHARE = 0.0005;  // smaller parts are not listed
const SPARE = ["sky", "lime", "brown", "slate", "pink"];

const partColor = (table, name, index) => table[name] || SPARE[index % SPARE.length];

function stack(parts, total, table, text, thin) {
  return el("div", { class: thin ? "stack thin" : "stack", role: "img",
    "aria-label": parts.map(([name, value]) => `${name} ${text(value)}`).join(", ") },
  parts.map(([name, value], index) => el("i", { title: `${name}: ${text(value)} (${format.percent(value / total)})`,
    style: { width: `${(value / total) * 100}%`, background: `var(--${partColor(table, name, index)})` } })));
}

function legend(parts, total, table, text, meanings) {
  return el("ul", { class: "legend" }, parts.map(([name, value], index) => el("li", { title: meanings[name] },
    el("span", { class: "swatch", style: { background: `var(--${partColor(table, name, index)})` } }),
    el("span", {}, name), el("b", {}, text(value)),
    el("span", { class: "faint" }, format.percent(value / total)))));
}

/** Shows where every second of the runs went; `meanings` explains the parts. */
export function showGoodput(section, runs, meanings) {
  const accounts = runs.filter((run) => run.goodput && run.goodput.wall_seconds > 0);
  setNote(section, accounts.length === 1
    ? `${format.seconds(accounts[0].goodput.wall_seconds)} in ${accounts[0].attempts.length} ${accounts[0].attempts.length === 1 ? "attempt" : "attempts"}; every second is in one part`
    : "every second of every attempt is in one part");
  const body = section.querySelector(".body");
  if (!accounts.length) {
    fill(body, el("p", { class: "empty" }, "The account begins with the first record of the run."));
    return;
  }
  fill(body, accounts.map((run) => {
    const { wall_seconds: wall, parts } = run.goodput;
    const shown = Object.entries(parts).filter(([, value]) => value > 0);
    return el("div", { class: "account" }, runs.length > 1 ? el("h3", {}, `${run.name}, ${format.seconds(wall)}`) : null,
      stack(shown, wall, PART_COLORS, format.seconds, false), legend(shown.filter(([, value]) => value >= MIN_SHARE * wall), wall, PART_COLORS, format.seconds, meanings),
      run.goodput.notes.map((note) => el("p", { class: "note" }, note)));
  }));
}

/** Shows the memory classes of every rank at the moment of its largest sum. */
export function showMemory(section, run) {
  const body = section.querySelector(".body");
  const rows = run.memory;
  setNote(section, rows.length ? `live tensors at the peak of step ${format.integer(rows[0].step)}` : "");
  if (!rows.length) {
    fill(body, el("p", { class: "empty" }, "The memory is counted in the second step of an attempt, and then every ",
      el("code", {}, "count_bytes_every"), " steps."));
    return;
  }
  const largest = Math.max(...rows.map((row) => row.total), 1);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.classes)))];
  const totals = names.map((name) => [name, Math.max(...rows.map((row) => row.classes[name] || 0))]).filter(([, value]) => value);
  fill(body, rows.map((row) => {
    const parts = names.map((name) => [name, row.classes[name] || 0]);
    const bar = stack(parts, row.total || 1, MEMORY_COLORS, format.bytes, true);
    bar.style.width = `${(row.total / largest) * 100}%`;
    return el("div", { class: "bar-row" }, el("span", {}, `rank ${row.rank}`), bar,
      el("span", { class: "number" }, format.bytes(row.total)));
  }), el("ul", { class: "legend" }, totals.map(([name, value]) => el("li", {},
    el("span", { class: "swatch", style: { background: `var(--${MEMORY_COLORS[name] || "grey"})` } }), el("span", {}, name),
    el("b", {}, format.bytes(value)), rows.length > 1 ? el("span", { class: "faint" }, "at most") : null))));
}
