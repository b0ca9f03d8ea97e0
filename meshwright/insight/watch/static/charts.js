// Curves over the steps, drawn by uPlot: mean per bin with the range of the bin behind it, and attempts marked.
import { color, el } from "./dom.js";
import * as format from "./format.js";

export const PHASE_COLORS = {
  fetch: "gold", copy: "brown", forward: "blue", backward: "teal", update: "green", "waiting for other ranks": "orange",
};

const axisStyle = (values, size) => ({
  stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1, size: 4 },
  font: `12px ${getComputedStyle(document.body).fontFamily}`, values: (_, splits) => splits.map(values), size, gap: 4,
});

/** A chart of one figure over the steps. `onSelect(from, to)` is called when the reader drags over a part. */
export class StepChart {
  constructor(parent, title, options) {
    this.options = options;
    this.readout = el("span", { class: "readout" });
    this.host = el("div", { class: "plot" });
    this.title = el("span", {}, title);
    this.box = el("div", { class: options.full ? "chart full" : "chart" }, el("h3", {}, this.title, this.readout), this.host);
    parent.append(this.box);
    this.marks = [];
    this.shape = "";
    new ResizeObserver(() => this.resize()).observe(this.host);
  }

  resize() {
    const width = this.host.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
  }

  /** Shows `series` (uPlot's options) with `data`; the chart is built again only if the series are others. */
  show(shape, series, bands, data, marks, latest) {
    this.marks = marks;
    this.latest = latest;
    if (this.plot && this.shape === shape) {
      this.plot.setData(data);
    } else {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.settings(series, bands), data, this.host);
    }
    this.showReadout(this.plot.cursor.idx);
  }

  settings(series, bands) {
    const { height, format: text, onSelect } = this.options;
    return {
      width: Math.max(120, this.host.clientWidth), height, bands, series: [{}, ...series],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false },
      scales: { x: { time: false }, y: { range: (plot, low, high) => this.range(plot, low, high) } },
      axes: [axisStyle(format.count, 26), axisStyle(text, 58)],
      padding: [8, 8, 0, 0],
      hooks: {
        draw: [(plot) => this.drawMarks(plot)],
        setCursor: [(plot) => this.showReadout(plot.cursor.idx)],
        setSelect: [(plot) => {
          const from = plot.posToVal(plot.select.left, "x");
          const to = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (to - from >= 2) onSelect(Math.floor(from), Math.ceil(to));
        }],
      },
    };
  }

  /** The range of the y axis; with `clips`, a few very large values leave the chart instead of flattening the others. */
  range(plot, low, high) {
    const { zero, clips } = this.options;
    if (low === null || high === null) return [0, 1];
    if (!zero) {
      const margin = (high - low || Math.abs(high) || 1) * 0.06;
      return [low - margin, high + margin];
    }
    const top = clips ? Math.min(high, 2.5 * usualHigh(plot.data[1])) : high;
    return [0, top > 0 ? top * 1.05 : 1];
  }

  /** Draws a dashed line where an attempt begins. */
  drawMarks(plot) {
    const { ctx: context, bbox } = plot;
    const density = window.devicePixelRatio || 1;
    context.save();
    context.beginPath();
    context.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    context.clip();
    context.font = `${11 * density}px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    let free = -Infinity;
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.step, "x", true);
      if (x < bbox.left - 1 || x > bbox.left + bbox.width) continue;
      context.setLineDash([4 * density, 3 * density]);
      context.lineWidth = density;
      context.strokeStyle = color("faint");
      context.beginPath();
      context.moveTo(x, bbox.top);
      context.lineTo(x, bbox.top + bbox.height);
      context.stroke();
      const width = context.measureText(mark.label).width;
      if (x > free && x + width < bbox.left + bbox.width) {
        context.setLineDash([]);
        context.strokeStyle = color("card", 0.85);
        context.lineWidth = 4 * density;
        context.strokeText(mark.label, x + 4 * density, bbox.top + 11 * density);
        context.fillStyle = color("soft");
        context.fillText(mark.label, x + 4 * density, bbox.top + 11 * density);
        free = x + width + 10 * density;
      }
    }
    context.restore();
  }

  showReadout(index) {
    this.readout.textContent = this.latest(index ?? null);
  }

  /** Builds the chart again at the next `show`, after the theme has changed. */
  reset() {
    this.shape = "";
  }
}

/** The value that 95 % of the values do not exceed. */
function usualHigh(values) {
  const sorted = values.filter((value) => value !== null && value !== undefined).sort((one, other) => one - other);
  return sorted[Math.floor(0.95 * (sorted.length - 1))];
}

/** Shows one figure of all runs: {color, name, steps, low, mean, high} each, and `dots`: [step, value] pairs. */
export function showCurve(chart, runs, marks, dots = []) {
  const present = runs.filter((run) => run.steps.length);
  const shape = `${present.map((run) => run.color).join()} ${dots.length > 0}`;
  const series = present.flatMap((run) => [
    { stroke: color(run.color), width: 1.6, spanGaps: true, points: { show: run.steps.length < 2 } },
    { stroke: "transparent", width: 0, points: { show: false } }, { stroke: "transparent", width: 0, points: { show: false } },
  ]);
  const bands = present.map((run, index) => ({ series: [3 * index + 3, 3 * index + 2], fill: color(run.color, 0.22) }));
  const tables = present.map((run) => [run.steps, run.mean, run.low, run.high]);
  if (dots.length) {
    series.push({ stroke: color("ink"), width: 0, points: { show: true, size: 6, width: 1.5, fill: color("card") } });
    tables.push([dots.map(([step]) => step), dots.map(([, value]) => value)]);
  }
  const data = tables.length > 1 ? uPlot.join(tables) : tables[0] || [[]];
  const text = chart.options.format;
  chart.show(shape, series, bands, data, marks, (index) => present.map((run) => {
    const step = index === null ? null : data[0][index];
    const at = step === null ? run.steps.length - 1 : nearest(run.steps, step);
    const name = present.length > 1 ? `${run.name} ` : "";
    const where = step === null || run !== present[0] ? "" : `step ${format.integer(run.steps[at])}: `;
    return `${where}${name}${text(run.mean[at])}`;
  }).join(" · "));
}

/** Shows the phases of a run on top of each other. */
export function showStack(chart, steps, phases, marks) {
  const names = Object.keys(phases);
  const sums = names.map(() => []);
  steps.forEach((_, row) => {
    let sum = 0;
    names.forEach((name, index) => { sum += phases[name][row] || 0; sums[index][row] = sum; });
  });
  const order = names.map((_, index) => index).reverse();  // the sum of all first: the others are painted over it
  const series = order.map((index) => ({
    stroke: color("card"), width: 0.5, fill: color(PHASE_COLORS[names[index]] || "grey"), points: { show: false },
  }));
  const data = [steps, ...order.map((index) => sums[index])];
  chart.show(names.join(), series, [], data, marks, (at) => {
    const row = at ?? steps.length - 1;
    if (row < 0) return "";
    return `step ${format.integer(steps[row])}: ${names.filter((name) => phases[name][row] > 0)
      .map((name) => `${name} ${format.seconds(phases[name][row])}`).join(", ")}`;
  });
}

function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}
