// The live page: receives the snapshots of the runs, asks for the data of charts when it has changed, and draws it.
import { showGoodput, showMemory } from "./bars.js";
import { PHASE_COLORS, showCurve, showStack, StepChart } from "./charts.js";
import { el, fill, forgetColors, setNote } from "./dom.js";
import * as format from "./format.js";
import { HeatMap } from "./heatmap.js";
import { connectKeys } from "./keyboard.js";
import { showCheckpoints, showDiagnosis, showDifferences, showIncidents } from "./lists.js";
import { LogTail } from "./logs.js";
import { Rollouts } from "./rollouts.js";
import { showSignals } from "./signals.js";
import { StepTimeline } from "./timeline.js";

const RUN_COLORS = ["blue", "orange", "green", "violet", "pink", "teal", "gold", "slate"];
const REFRESH_SECONDS = 2;
const DIAGNOSIS_SECONDS = 10;
const SECTIONS = [...document.querySelectorAll("main > section")];

const section = (name) => document.getElementById(name);
const state = { runs: [], parts: {}, selected: 0, range: null, step: null, curves: new Map(), drawn: "", diagnosed: 0 };

const zoom = (from, to) => { state.range = [from, to]; refresh(true); };
const chartOptions = (text, zero) => ({ height: 190, format: text, zero, onSelect: zoom });
const curveBox = el("div", { class: "charts" });
section("curves").querySelector(".body").append(curveBox);
const charts = {
  loss: new StepChart(curveBox, "Loss", { ...chartOptions(format.number, false), full: true }),
  grad_norm: new StepChart(curveBox, "Gradient norm", chartOptions(format.number, true)),
  throughput: new StepChart(curveBox, "Throughput, tokens per second", chartOptions(format.count, true)),
};
const rollouts = new Rollouts(section("rollouts"), chartOptions);
const phaseBox = el("div", { class: "charts" });
const phaseLegend = el("ul", { class: "legend" });
section("phases").querySelector(".body").append(phaseBox, phaseLegend);
const phaseChart = new StepChart(phaseBox, "Seconds per step of rank 0", { ...chartOptions(format.seconds, true), full: true, clips: true });
const heatMap = new HeatMap(section("heatmap"));
const timeline = new StepTimeline(section("timeline"), (step) => { state.step = step; refreshTimeline(); });
const log = new LogTail(section("log"), (rank, attempt) => ask(`log?rank=${rank}&attempt=${attempt}`));
const resetButton = el("button", { type: "button", onclick: () => { state.range = null; refresh(true); } }, "All steps");
section("curves").querySelector(".tools").append(resetButton);

/** Asks for the answer of a run; null if there is none now. */
async function ask(path, run = state.selected) {
  try {
    const answer = await fetch(`/api/runs/${run}/${path}`);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

const rangeQuery = () => (state.range ? `&from=${state.range[0]}&to=${state.range[1]}` : "");
const known = () => state.runs.filter((run) => run.signals);

function drawSnapshots() {
  const runs = known();
  const run = state.runs[state.selected];
  if (!runs.length) return;
  showSignals(section("signals"), runs);
  showGoodput(section("goodput"), runs, state.parts);
  if (!run?.signals) return;
  document.title = `${run.name}: ${run.signals.state}`;
  rollouts.showAccount(run);
  showMemory(section("memory"), run);
  showCheckpoints(section("checkpoints"), run);
  showIncidents(section("incidents"), run);
  log.offer(run);
}

function drawCurves() {
  const shown = state.runs.filter((run) => state.curves.has(run.id));
  const selected = state.curves.get(state.selected);
  const marks = attemptMarks(selected);
  const range = selected?.range || [0, 0];
  const bin = selected && selected.step.length ? Math.max(1, Math.round(selected.rows / selected.step.length)) : 1;
  setNote(section("curves"), !selected?.rows ? "no step is complete yet"
    : `steps ${format.integer(range[0])} to ${format.integer(range[1] - 1)}${bin > 1 ? `; ${bin} steps per point, shaded from the smallest to the largest value` : ""}; drag to zoom`);
  resetButton.setAttribute("aria-pressed", String(!state.range));
  for (const [figure, chart] of Object.entries(charts)) {
    showCurve(chart, shown.map((run) => ({ ...state.curves.get(run.id)[figure], steps: state.curves.get(run.id).step,
      color: run.color, name: run.name })), marks, figure === "loss" ? heldOut(selected) : []);
  }
  charts.loss.title.textContent = heldOut(selected).length ? "Loss; circles: held-out loss" : "Loss";
  charts.throughput.title.textContent = `Throughput, ${state.runs[state.selected]?.unit || "tokens"} per second`;
  rollouts.showCurves(shown.map((run) => ({ color: run.color, name: run.name, curves: state.curves.get(run.id).rollouts })), marks);
  if (!selected) return;
  showStack(phaseChart, selected.step, selected.phases, marks);
  setNote(section("phases"), `${bin > 1 ? "means per point" : "every step"}; orange is exposed communication, and the bubble of a pipeline`);
  fill(phaseLegend, Object.keys(selected.phases).map((name) => el("li", {},
    el("span", { class: "swatch", style: { background: `var(--${PHASE_COLORS[name] || "grey"})` } }), name)));
}

function attemptMarks(curves) {
  return (curves?.attempts || []).slice(1).map(({ number, step }) => ({ step, label: `attempt ${number}` }));
}

/** The held-out losses within the range that is shown. */
function heldOut(curves) {
  const [from, to] = curves?.range || [0, 0];
  const last = new Map((curves?.evaluations || []).filter(([step, loss]) => loss !== null && step >= from && step <= to));
  return [...last].sort(([one], [other]) => one - other);
}

async function refreshTimeline() {
  const data = await ask(state.step === null ? "timeline" : `timeline?step=${state.step}`);
  if (data) timeline.show(data, state.step === null);
}

async function refreshDiagnosis() {
  state.diagnosed = Date.now();
  const answer = await ask("diagnosis");
  if (answer) showDiagnosis(section("diagnosis"), answer.findings);
}

let refreshing = false;
let again = false;

/** Asks for everything that was drawn from older records; at most one refresh runs at a time. */
async function refresh(force = false) {
  const wanted = JSON.stringify([state.selected, state.range, state.runs.map((run) => run.version)]);
  if (document.hidden || (!force && wanted === state.drawn)) return;
  if (refreshing) {
    again = again || force;
    return;
  }
  refreshing = true;
  state.drawn = wanted;
  const width = Math.round(Math.max(200, Math.min(800, curveBox.clientWidth)) / 100) * 100;
  const answers = await Promise.all([
    ...state.runs.map((run) => ask(`curves?points=${width}${rangeQuery()}`, run.id)),
    ask(`heatmap?columns=200${rangeQuery()}`),
  ]);
  state.runs.forEach((run, index) => { if (answers[index]) state.curves.set(run.id, answers[index]); });
  drawCurves();
  if (answers.at(-1)) heatMap.show(answers.at(-1));
  await Promise.all([refreshTimeline(), log.refresh(),
    Date.now() - state.diagnosed > DIAGNOSIS_SECONDS * 1000 ? refreshDiagnosis() : null]);
  refreshing = false;
  if (again) {
    again = false;
    refresh(true);
  }
}

function select(place) {
  if (place >= state.runs.length) return;
  state.selected = place;
  state.step = null;
  state.diagnosed = 0;
  drawRunButtons();
  drawSnapshots();
  refresh(true);
}

function drawRunButtons() {
  fill(section("runs"), state.runs.map((run, index) => {
    const label = [el("span", { class: "swatch", style: { background: `var(--${run.color})` } }), el("span", {}, run.name)];
    if (state.runs.length === 1) return el("span", { class: "run-button" }, label[1]);
    return el("button", { type: "button", class: "run-button", "data-run": index, "aria-current": String(index === state.selected),
      title: `Show the details of ${run.name} (key ${index + 1})` }, label);
  }));
}

section("runs").addEventListener("click", (event) => {
  const button = event.target.closest("[data-run]");
  if (button) select(Number(button.dataset.run));
});

function listen() {
  const source = new EventSource("/api/updates");
  const link = section("link");
  const show = (name, text) => { link.dataset.state = name; link.textContent = text; };
  source.addEventListener("open", () => show("live", "live"));
  source.addEventListener("run", (event) => {
    const snapshot = JSON.parse(event.data);
    Object.assign(state.runs[snapshot.id], snapshot);
    drawSnapshots();
    if (!state.drawn) refresh(true);
  });
  source.addEventListener("error", () => {
    show("lost", "connection lost, trying again");
    if (source.readyState === EventSource.CLOSED) {
      source.close();
      setTimeout(listen, 3000);
    }
  });
}

function themeIsDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Draws everything again in the colours of the theme. */
function applyTheme() {
  section("theme").textContent = themeIsDark() ? "Light" : "Dark";
  forgetColors();
  for (const chart of [...Object.values(charts), phaseChart, rollouts]) chart.reset();
  drawCurves();
  heatMap.draw();
  timeline.draw();
}

function switchTheme() {
  const theme = themeIsDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("meshwright-theme", theme); } catch { /* the choice lasts until the page is closed */ }
  applyTheme();
}

function jump(direction) {
  const shown = SECTIONS.filter((one) => !one.hidden);
  const top = shown.findIndex((one) => one.getBoundingClientRect().bottom > 90);
  const next = shown[Math.max(0, Math.min(shown.length - 1, top + direction))];
  next.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

/** Shows the earlier or later half of a zoomed range. */
function pan(direction) {
  if (!state.range) return;
  const width = state.range[1] - state.range[0];
  const from = Math.max(0, state.range[0] + direction * Math.ceil(width / 2));
  zoom(from, from + width);
}

/** Shows fewer steps around the middle, or more of them. */
function scaleRange(factor) {
  const curves = state.curves.get(state.selected);
  if (!curves?.rows) return;
  const [from, to] = state.range || curves.range;
  const half = Math.max(2, ((to - from) * factor) / 2);
  const middle = (from + to) / 2;
  zoom(Math.max(0, Math.floor(middle - half)), Math.ceil(middle + half));
}

async function start() {
  const page = await (await fetch("/api/runs")).json();
  state.parts = page.parts;
  state.runs = page.runs.map((run) => ({ ...run, color: RUN_COLORS[run.id % RUN_COLORS.length] }));
  drawRunButtons();
  section("theme").addEventListener("click", switchTheme);
  section("theme").textContent = themeIsDark() ? "Light" : "Dark";
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
  document.addEventListener("visibilitychange", () => refresh());
  connectKeys([
    [["j"], "next section", () => jump(1)],
    [["k"], "previous section", () => jump(-1)],
    [["+", "-"], "show fewer or more steps in the charts", (key) => scaleRange(key === "+" ? 0.5 : 2)],
    [["ArrowLeft", "ArrowRight"], "earlier or later steps, in a part of the run", (key) => pan(key === "ArrowLeft" ? -1 : 1)],
    [["0"], "show all steps", () => resetButton.click()],
    [["h"], "heat map: local time or step time", () => heatMap.toggle()],
    [["[", "]"], "timeline of the step before or after", (key) => timeline.data?.rows.length && timeline.onStep(Math.max(0, timeline.data.step + (key === "]" ? 1 : -1)))],
    [["d"], "dark or light", switchTheme],
    ...(state.runs.length > 1 ? [[state.runs.map((_, index) => String(index + 1)).slice(0, 9), "details of that run", (key) => select(Number(key) - 1)]] : []),
  ]);
  if (state.runs.length > 1) {
    const configs = await (await fetch("/api/configs")).json();
    showDifferences(section("configs"), state.runs, configs.differences);
  }
  listen();
  setInterval(() => { refresh(); }, REFRESH_SECONDS * 1000);
}

start();
