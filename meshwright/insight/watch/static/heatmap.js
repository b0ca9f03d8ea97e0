// The heat map: one row per rank, one column per bin of steps; a slow rank is a horizontal stripe.
import { color, el, fill, placeTip, prepareCanvas, roundStep, setNote } from "./dom.js";
import * as format from "./format.js";

const LEFT = 62;
const TOP = 5;
const BOTTOM = 22;

/** Draws the heat map of a run into a section, and names what the pointer or the arrow keys point at. */
export class HeatMap {
  constructor(section) {
    this.section = section;
    this.figure = "local";
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.canvas = el("canvas", { tabindex: 0, role: "img" });
    this.box = el("div", { class: "canvas-box" }, this.canvas, this.tip);
    this.words = el("p", { class: "note" });
    this.empty = el("p", { class: "empty" }, "The heat map begins with the first steps of the ranks.");
    section.querySelector(".body").append(this.words, this.box, this.empty);
    this.buttons = ["local", "seconds"].map((figure) => el("button", { type: "button", onclick: () => this.choose(figure) },
      figure === "local" ? "Local time" : "Step time"));
    this.scale = el("span", { class: "scale" });
    section.querySelector(".tools").append(this.scale, ...this.buttons);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("blur", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
    this.cell = null;
  }

  choose(figure) {
    this.figure = figure;
    this.draw();
  }

  toggle() {
    this.choose(this.figure === "local" ? "seconds" : "local");
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const { data } = this;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(this.figure === ["local", "seconds"][index])));
    const rows = data?.ranks.length || 0;
    this.box.hidden = rows === 0;
    this.empty.hidden = rows > 0;
    this.scale.hidden = rows === 0;
    if (!rows || !this.box.clientWidth) return;
    const width = this.box.clientWidth;
    this.rowHeight = Math.max(4, Math.min(26, Math.floor(380 / rows)));
    const height = TOP + rows * this.rowHeight + BOTTOM;
    const context = prepareCanvas(this.canvas, width, height);
    const [low, high] = data[this.figure].scale;
    const columns = data.columns;
    const cells = data[this.figure].cells;
    const palette = heatPalette();
    const cellWidth = (width - LEFT) / columns;
    context.fillStyle = color("sunk");
    context.fillRect(LEFT, TOP, width - LEFT, rows * this.rowHeight);
    for (let row = 0; row < rows; row += 1) {
      const gap = this.rowHeight > 7 ? 1 : 0;
      for (let column = 0; column < columns; column += 1) {
        const value = cells[row][column];
        if (value === null) continue;
        const share = high > low ? (value - low) / (high - low) : 0;
        context.fillStyle = palette[Math.max(0, Math.min(palette.length - 1, Math.floor(share * palette.length)))];
        const left = LEFT + Math.floor(column * cellWidth);
        context.fillRect(left, TOP + row * this.rowHeight, LEFT + Math.floor((column + 1) * cellWidth) - left, this.rowHeight - gap);
      }
    }
    this.drawLabels(context, width, rows);
    fill(this.scale, format.seconds(low), el("i"), `${format.seconds(high)} and more`);
    this.describe();
  }

  drawLabels(context, width, rows) {
    const rowsPerLabel = Math.ceil(15 / this.rowHeight);
    context.fillStyle = color("faint");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let row = 0; row < rows; row += rowsPerLabel) {
      context.fillText(`rank ${this.data.ranks[row]}`, LEFT - 8, TOP + (row + 0.5) * this.rowHeight);
    }
    context.textBaseline = "top";
    const [from, to] = this.data.range;
    const every = roundStep(Math.max(1, (to - from) / Math.max(2, Math.floor((width - LEFT) / 75))));
    context.textAlign = "center";
    for (let step = Math.ceil(from / every) * every; step < to; step += every) {
      const x = LEFT + ((step + 0.5 - from) * (width - LEFT)) / (to - from);
      const text = format.integer(step);
      const half = context.measureText(text).width / 2;
      if (x + half < width) context.fillText(text, Math.max(x, LEFT + half), TOP + rows * this.rowHeight + 7);
    }
    context.textAlign = "right";
    context.fillText("step", LEFT - 8, TOP + rows * this.rowHeight + 7);
  }

  /** Says in words what the colours show: which rank is slower than the others, and by how much. */
  describe() {
    const { data } = this;
    const means = data.local.means;
    const sorted = means.filter((value) => value !== null).sort((one, other) => one - other);
    const median = sorted[Math.floor((sorted.length - 1) / 2)] || 0;
    const slowest = means.indexOf(sorted[sorted.length - 1]);
    const factor = median > 0 ? means[slowest] / median : 1;
    const excess = means[slowest] - median;
    const steps = `steps ${format.integer(data.range[0])} to ${format.integer(data.range[1] - 1)}`;
    this.words.textContent = sorted.length > 1 && factor >= 1.15
      ? `Rank ${data.ranks[slowest]} takes ${format.seconds(excess)} per step longer than the other ranks (${factor.toFixed(1)} times the median) in ${steps}.`
      : `No rank stands out in ${steps}.`;
    this.canvas.setAttribute("aria-label", `Heat map of ${data.ranks.length} ranks. ${this.words.textContent} The arrow keys read single cells.`);
    setNote(this.section, this.figure === "local" ? "seconds that each rank works by itself, without waiting for others"
      : "seconds of the whole step; ranks wait for each other, so that all of them show a slow one");
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const x = event.clientX - left;
    const y = event.clientY - top;
    const column = Math.floor(((x - LEFT) / (this.canvas.clientWidth - LEFT)) * this.data.columns);
    this.showCell(Math.floor((y - TOP) / this.rowHeight), column, x, y);
  }

  move(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (!(event.key in moves) || !this.data?.ranks.length) return;
    event.preventDefault();
    event.stopPropagation();
    const [down, right] = moves[event.key];
    const [row, column] = this.cell ?? [0, 0];
    const next = [clamp(row + down, this.data.ranks.length), clamp(column + right, this.data.columns)];
    const x = LEFT + ((next[1] + 0.5) * (this.canvas.clientWidth - LEFT)) / this.data.columns;
    this.showCell(next[0], next[1], x, TOP + (next[0] + 0.5) * this.rowHeight);
  }

  showCell(row, column, x, y) {
    const { data } = this;
    if (row < 0 || row >= data.ranks.length || column < 0 || column >= data.columns) {
      this.tip.hidden = true;
      return;
    }
    this.cell = [row, column];
    const [from, to] = data.range;
    const first = from + Math.floor((column * (to - from)) / data.columns);
    const last = Math.max(first, from + Math.floor(((column + 1) * (to - from)) / data.columns) - 1);
    const text = (value) => (value === null ? "not recorded" : format.seconds(value));
    const where = first === last ? `step ${format.integer(first)}` : `steps ${format.integer(first)} to ${format.integer(last)}`;
    placeTip(this.tip, this.box, x, y, `rank ${data.ranks[row]}, ${where}: local ${text(data.local.cells[row][column])}, step ${text(data.seconds.cells[row][column])}`);
  }
}

const clamp = (value, size) => Math.max(0, Math.min(size - 1, value));

/** 64 colours from fast to slow. */
function heatPalette() {
  const stops = [0, 1, 2, 3, 4].map((index) => color(`heat-${index}`).match(/[\d.]+/g).slice(0, 3).map(Number));
  return Array.from({ length: 64 }, (_, index) => {
    const place = (index / 63) * (stops.length - 1);
    const stop = Math.min(stops.length - 2, Math.floor(place));
    const mixed = stops[stop].map((from, channel) => Math.round(from + (stops[stop + 1][channel] - from) * (place - stop)));
    return `rgb(${mixed.join()})`;
  });
}
