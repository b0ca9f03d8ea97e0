// The timeline of one step: one row per rank, what it does from the beginning to the end of the step.
import { color, el, placeTip, prepareCanvas, roundStep, setNote } from "./dom.js";
import * as format from "./format.js";

const LEFT = 62;
const TOP = 5;
const BOTTOM = 22;
const KIND_COLORS = { fetch: "gold", copy: "brown", forward: "blue", backward: "teal", sync: "wait", update: "green" };

/** Draws the timeline that the server gives for a step; `onStep(step)` asks for another one, null for the newest. */
export class StepTimeline {
  constructor(section, onStep) {
    this.section = section;
    this.onStep = onStep;
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.canvas = el("canvas", { role: "img" });
    this.box = el("div", { class: "canvas-box" }, this.canvas, this.tip);
    this.legend = el("ul", { class: "legend" });
    this.empty = el("p", { class: "empty" }, "The timeline begins with the first complete step.");
    section.querySelector(".body").append(this.box, this.legend, this.empty);
    this.input = el("input", { type: "number", min: 0, "aria-label": "Step of the timeline", class: "step-input" });
    this.newest = el("button", { type: "button", onclick: () => onStep(null) }, "Newest");
    this.input.addEventListener("change", () => onStep(Math.max(0, Math.floor(Number(this.input.value)) || 0)));
    section.querySelector(".tools").append(
      el("button", { type: "button", "aria-label": "Earlier step", onclick: () => this.data && onStep(Math.max(0, this.data.step - 1)) }, "◀"),
      this.input,
      el("button", { type: "button", "aria-label": "Later step", onclick: () => this.data && onStep(this.data.step + 1) }, "▶"),
      this.newest);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  show(data, follows) {
    this.data = data;
    this.newest.setAttribute("aria-pressed", String(follows));
    this.draw();
  }

  draw() {
    const { data } = this;
    const rows = data?.rows.length || 0;
    this.box.hidden = rows === 0;
    this.legend.hidden = rows === 0;
    this.empty.hidden = rows > 0;
    if (!rows || !this.box.clientWidth) return;
    if (document.activeElement !== this.input) this.input.value = data.step;
    setNote(this.section, data.source === "spans" ? `${format.seconds(data.seconds)}; hatched: waiting for other ranks${data.pipeline ? "; numbers are micro-batches" : ""}`
      : `${format.seconds(data.seconds)}, phases in their order; hatched: waiting for other ranks`);
    const width = this.box.clientWidth;
    this.rowHeight = Math.max(6, Math.min(28, Math.floor(420 / rows)));
    const context = prepareCanvas(this.canvas, width, TOP + rows * this.rowHeight + BOTTOM);
    this.perSecond = (width - LEFT) / (data.seconds || 1);
    data.rows.forEach((row, index) => this.drawRow(context, row, index));
    this.drawAxis(context, width, rows);
    this.legend.replaceChildren(...data.kinds.map((kind) => el("li", {},
      el("span", { class: "swatch", style: { background: `var(--${KIND_COLORS[kind] || "grey"})` } }), kind)));
    this.canvas.setAttribute("aria-label", `Timeline of step ${data.step} on ${rows} ranks, ${format.seconds(data.seconds)}`);
  }

  drawRow(context, row, index) {
    const top = TOP + index * this.rowHeight;
    const height = this.rowHeight - (this.rowHeight > 8 ? 3 : 1);
    context.textBaseline = "middle";
    if (index % Math.ceil(15 / this.rowHeight) === 0) {
      context.fillStyle = color("faint");
      context.textAlign = "right";
      context.fillText(`rank ${row.rank}`, LEFT - 8, top + height / 2);
    }
    context.fillStyle = color("sunk");
    context.fillRect(LEFT, top, this.data.seconds * this.perSecond, height);
    context.textAlign = "center";
    for (const [start, end, kind, label] of row.spans) {
      const name = this.data.kinds[kind];
      const left = LEFT + start * this.perSecond;
      const width = Math.max(0.5, (end - start) * this.perSecond);
      context.fillStyle = color(KIND_COLORS[name] || "grey");
      context.fillRect(left, top, Math.max(0.5, width - (width > 4 ? 1 : 0)), height);
      if (label && width > 16 && height > 12) {
        context.fillStyle = color("card");
        context.fillText(label, left + width / 2, top + height / 2 + 0.5, width - 3);
      }
    }
    for (const [start, end] of row.waits) hatch(context, LEFT + start * this.perSecond, top, (end - start) * this.perSecond, height);
  }

  drawAxis(context, width, rows) {
    context.fillStyle = color("faint");
    context.textBaseline = "top";
    const every = roundStep((this.data.seconds || 1) / Math.max(2, Math.floor((width - LEFT) / 85)));
    for (let place = 0; place * every <= this.data.seconds; place += 1) {
      const x = LEFT + place * every * this.perSecond;
      context.textAlign = place === 0 ? "left" : x > width - 30 ? "right" : "center";
      context.fillText(format.seconds(Number((place * every).toPrecision(6))), x, TOP + rows * this.rowHeight + 7);
    }
  }

  point(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const x = event.clientX - left;
    const y = event.clientY - top;
    const row = this.data.rows[Math.floor((y - TOP) / this.rowHeight)];
    const time = (x - LEFT) / this.perSecond;
    const span = row?.spans.findLast(([start, end]) => start <= time && time <= end);
    if (!span) {
      this.tip.hidden = true;
      return;
    }
    const wait = row.waits.find(([start, end]) => start <= time && time <= end);
    const text = `rank ${row.rank}, ${this.data.kinds[span[2]]}${span[3] ? ` ${span[3]}` : ""}: ${format.seconds(span[1] - span[0])}`;
    placeTip(this.tip, this.box, x, y, wait ? `${text}, of which waiting ${format.seconds(wait[1] - wait[0])}` : text);
  }
}

/** Covers a rectangle with diagonal lines. */
function hatch(context, left, top, width, height) {
  if (width < 1) return;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = color("card", 0.75);
  context.lineWidth = 1.5;
  context.beginPath();
  for (let x = left - height; x < left + width; x += 6) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
  context.restore();
}
