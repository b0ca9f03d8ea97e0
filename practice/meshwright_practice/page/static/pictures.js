// Draws the pictures of experiments: bars, timelines, heat maps and curves, from the data that the terminal draws too.

import { el, roundStep } from "/static/dom.js";
import * as format from "/static/format.js";

const SPACE = "http://www.w3.org/2000/svg";
const COLORS = 8;
const LONG_UNIT = 8;

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A value with its unit, as the terminal writes it. */
export function quantity(value, unit) {
  if (unit && (unit === "count" || unit.length > LONG_UNIT)) unit = ""; // the title names it
  if (["B", "byte", "bytes"].includes(unit)) return format.bytes(value);
  if (["s", "second", "seconds"].includes(unit)) return format.seconds(value);
  const text = Number.isInteger(value) && Math.abs(value) < 1e15 ? value.toLocaleString("en") : format.number(value);
  return unit ? `${text} ${unit}` : text;
}

function legend(names) {
  if (names.length < 2) return null;
  return el("ul", { class: "legend" }, names.map((name, number) =>
    el("li", {}, el("span", { class: `swatch c${number % COLORS}` }), name)));
}

/** The figure of a picture, as wide as its container has room. */
export function drawPicture(picture, width) {
  const unit = picture.unit ?? picture.y_label ?? "";
  const shown = unit && unit !== "count" && !picture.title.toLowerCase().includes(unit.toLowerCase()) ? ` (${unit})` : "";
  const draw = { bars: drawBars, timeline: drawTimeline, "heat map": drawHeatMap, curves: drawCurves }[picture.type];
  return el("figure", { class: "picture" }, el("figcaption", {}, picture.title, el("span", { class: "faint" }, shown)), ...draw(picture, width));
}

function drawBars(picture) {
  const names = Object.keys(picture.parts);
  const total = (row) => names.reduce((sum, name) => sum + Math.max(0, picture.parts[name][row] ?? 0), 0);
  const largest = Math.max(...picture.labels.map((_, row) => total(row)), 0) || 1;
  const longest = Math.max(...picture.labels.map((label) => label.length), 0);
  const rows = picture.labels.map((label, row) => el("div", { class: "bar-row" },
    el("span", { class: "label" }, label),
    el("div", { class: "stack" }, names.map((name, number) => {
      const value = picture.parts[name][row] ?? 0;
      return el("i", { class: `c${number % COLORS}`, style: { width: `${(100 * Math.max(0, value)) / largest}%` }, title: `${name}: ${quantity(value, picture.unit)}` });
    })),
    el("span", { class: "number" }, quantity(total(row), picture.unit))));
  const box = el("div", {}, rows);
  box.style.setProperty("--label", `${Math.min(240, Math.max(60, longest * 8.4))}px`);
  return [box, legend(names)];
}

/** Spans that differ in a number only belong together, as on the terminal. */
const group = (name) => name.replace(/[\s_-]*\d+/g, "").trim() || name;

/** Rows of the lanes; spans of a lane that overlap are put below each other. */
function laneRows(spans) {
  const lanes = new Map(spans.map((span) => [span.lane, []]));
  for (const span of [...spans].sort((a, b) => a.begin - b.begin || a.end - b.end)) {
    const rows = lanes.get(span.lane);
    const row = rows.find((taken) => taken[taken.length - 1].end <= span.begin);
    if (row) row.push(span); else rows.push([span]);
  }
  return [...lanes].flatMap(([lane, rows]) => rows.map((row, number) => [number ? "" : lane, row]));
}

function drawTimeline(picture, room) {
  if (!picture.spans.length) return [el("p", { class: "empty" }, "There are no spans.")];
  const rows = laneRows(picture.spans);
  const groups = [...new Set(picture.spans.map((span) => group(span.name)))];
  const begin = Math.min(...picture.spans.map((span) => span.begin));
  const end = Math.max(...picture.spans.map((span) => span.end));
  const labels = Math.min(150, 12 + 7 * Math.max(...rows.map(([lane]) => lane.length)));
  const whole = picture.spans.every((span) => Number.isInteger(span.begin) && Number.isInteger(span.end));
  const width = Math.max(room, whole ? labels + (end - begin) * 15 : room);
  const plot = Math.min(width - labels - 2, whole ? (end - begin) * 48 : Infinity);
  const height = 28;
  const x = (time) => labels + ((time - begin) / (end - begin || 1)) * plot;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${rows.length * height + 22}`, role: "img", "aria-label": picture.title });
  rows.forEach(([lane, spans], number) => {
    const top = number * height;
    drawing.append(svg("text", { x: labels - 10, y: top + 17, "text-anchor": "end" }, lane));
    drawing.append(svg("rect", { class: "lane", x: labels, y: top + 1, width: plot, height: height - 4, rx: 4 }));
    for (const span of spans) {
      const size = Math.max(1.5, x(span.end) - x(span.begin));
      const box = svg("rect", { class: `span c${groups.indexOf(group(span.name)) % COLORS}`, x: x(span.begin), y: top + 1, width: size, height: height - 4, rx: 4 });
      box.append(svg("title", {}, `${span.lane}: ${span.name}, ${quantity(span.begin, picture.unit)} to ${quantity(span.end, picture.unit)}`));
      drawing.append(box);
      if (span.name.length * 6.6 + 5 < size) {
        drawing.append(svg("text", { class: "in", x: x(span.begin) + size / 2, y: top + 17, "text-anchor": "middle" }, span.name));
      }
    }
  });
  const under = rows.length * height + 14;
  drawing.append(svg("text", { x: labels, y: under }, quantity(begin, picture.unit)));
  drawing.append(svg("text", { x: labels + plot, y: under, "text-anchor": "end" }, quantity(end, picture.unit)));
  if (width > room) drawing.style.width = `${width}px`;
  return [el("div", { class: width > room ? "scroll" : "" }, drawing), legend(groups)];
}

/** A colour of the heat scale of the style sheet, for a level between 0 and 1. */
function heat(level) {
  const place = Math.min(3.999, Math.max(0, level) * 4);
  const from = Math.floor(place);
  return `color-mix(in srgb, var(--heat-${from + 1}) ${Math.round((place - from) * 100)}%, var(--heat-${from}))`;
}

function drawHeatMap(picture, room) {
  const numbers = picture.values.flat().filter((value) => value !== null);
  if (!numbers.length) return [el("p", { class: "empty" }, "There are no values.")];
  const low = Math.min(...numbers);
  const high = Math.max(...numbers);
  const labels = Math.min(150, 14 + 7 * Math.max(...picture.rows.map((row) => row.length)));
  const texts = picture.values.map((row) => row.map((value) => (value === null ? "" : quantity(value, ""))));
  const wanted = Math.max(...texts.flat().map((text) => text.length)) * 7 + 10;
  const cell = Math.max(4, Math.min(84, (room - labels) / picture.columns.length));
  const width = Math.max(room, labels + cell * picture.columns.length);
  const height = cell >= wanted ? 28 : 22;
  const widest = Math.max(...picture.columns.map((name) => name.length)) * 7 + 6;
  const every = Math.max(1, Math.ceil(widest / cell));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${20 + picture.rows.length * height}`, role: "img", "aria-label": picture.title });
  picture.columns.forEach((name, column) => {
    if (column % every === 0) drawing.append(svg("text", { x: labels + (column + 0.5) * cell, y: 12, "text-anchor": "middle" }, name));
  });
  picture.rows.forEach((name, row) => {
    const top = 18 + row * height;
    drawing.append(svg("text", { x: labels - 10, y: top + height / 2 + 4, "text-anchor": "end" }, name));
    picture.values[row].forEach((value, column) => {
      const level = value === null ? 0 : (value - low) / (high - low || 1);
      const box = svg("rect", { x: labels + column * cell, y: top, width: Math.max(1, cell - 1.5), height: height - 1.5, rx: cell > 10 ? 3 : 0 });
      box.style.fill = heat(level);
      box.append(svg("title", {}, `${name}, ${picture.columns[column]}: ${texts[row][column]} ${picture.unit}`));
      drawing.append(box);
      if (cell >= wanted) {
        const text = svg("text", { x: labels + (column + 0.5) * cell - 1, y: top + height / 2 + 4, "text-anchor": "middle" }, texts[row][column]);
        text.style.fill = level > 0.85 ? "light-dark(#fff, #171b21)" : level > 0.62 ? "#fff" : level > 0.3 ? "light-dark(#171b21, #fff)" : "var(--ink)";
        drawing.append(text);
      }
    });
  });
  if (width > room) drawing.style.width = `${width}px`;
  const scale = el("span", { class: "scale" }, quantity(low, picture.unit), el("i"), quantity(high, picture.unit));
  return [el("div", { class: width > room ? "scroll" : "" }, drawing), scale];
}

/** Round numbers between the ends of an axis, or the only value. */
function ticks(low, high) {
  if (high === low) return [low];
  const step = roundStep((high - low) / 4);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
}

function drawCurves(picture, room) {
  const names = Object.keys(picture.lines);
  const points = names.map((name) => picture.x.map((x, place) => [x, picture.lines[name][place]])
    .filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)));
  const values = points.flat().map(([, y]) => y);
  if (!values.length) return [el("p", { class: "empty" }, "There are no values.")];
  const logarithmic = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) >= 1000;
  const scaled = logarithmic ? Math.log10 : (value) => value;
  const [low, high] = [scaled(Math.min(...values)), scaled(Math.max(...values))];
  const [first, last] = [Math.min(...picture.x), Math.max(...picture.x)];
  const [left, right, top, height] = [64, 14, 8, Math.min(260, Math.max(170, room * 0.4))];
  const x = (value) => left + ((value - first) / (last - first || 1)) * (room - left - right);
  const y = (value) => top + (1 - (scaled(value) - low) / (high - low || 1)) * (height - top - 2);
  const drawing = svg("svg", { viewBox: `0 0 ${room} ${height + 36}`, role: "img", "aria-label": picture.title });
  for (const level of ticks(low, high)) {
    const value = logarithmic ? 10 ** level : level;
    drawing.append(svg("line", { class: "axis", x1: left, x2: room - right, y1: y(value), y2: y(value) }));
    drawing.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, quantity(Number(value.toPrecision(3)), "")));
  }
  points.forEach((line, number) => {
    const path = line.map(([px, py], place) => `${place ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("");
    const shape = svg("path", { class: `line c${number % COLORS}`, d: path });
    shape.append(svg("title", {}, names[number]));
    drawing.append(shape);
    if (line.length <= 24) {
      for (const [px, py] of line) {
        const dot = svg("circle", { class: `c${number % COLORS}`, cx: x(px), cy: y(py), r: 3.4 });
        dot.append(svg("title", {}, `${names[number]}: ${quantity(py, "")} at ${quantity(px, "")}`));
        drawing.append(dot);
      }
    }
  });
  drawing.append(svg("text", { x: left, y: height + 18 }, quantity(first, "")));
  drawing.append(svg("text", { x: (left + room - right) / 2, y: height + 18, "text-anchor": "middle" }, picture.x_label));
  drawing.append(svg("text", { x: room - right, y: height + 18, "text-anchor": "end" }, quantity(last, "")));
  const note = logarithmic ? el("p", { class: "note" }, `The axis of ${picture.y_label} is logarithmic.`) : null;
  return [drawing, legend(names), note].filter(Boolean);
}
