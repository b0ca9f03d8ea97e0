// Builds elements from text alone (never from markup), and resolves the colours of the style sheet for canvases.

/** Returns a new element. Children are nodes or text; `class`, `style` (an object), listeners and attributes are options. */
export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replaces the content of a node, unless it would be the same: what the reader has selected or opened stays. */
export function fill(node, ...children) {
  const holder = el("div", {}, ...children);
  if (node.childNodes.length === holder.childNodes.length
      && [...node.childNodes].every((child, index) => child.isEqualNode(holder.childNodes[index]))) return;
  const opened = [...node.querySelectorAll("details")].map((details) => details.open);
  node.replaceChildren(...holder.childNodes);
  node.querySelectorAll("details").forEach((details, index) => { details.open = opened[index] ?? details.open; });
}

const probe = el("span", { hidden: true });
const resolved = new Map();

/** Returns a colour of the style sheet, such as "blue", as the canvas needs it; `alpha` makes it transparent. */
export function color(name, alpha = 1) {
  const key = `${name}/${alpha}`;
  if (!resolved.has(key)) {
    if (!probe.isConnected) document.body.append(probe);
    const share = Math.round(alpha * 100);
    probe.style.color = alpha === 1 ? `var(--${name})` : `color-mix(in srgb, var(--${name}) ${share}%, transparent)`;
    resolved.set(key, getComputedStyle(probe).color);
  }
  return resolved.get(key);
}

/** Forgets the resolved colours, after the theme has changed. */
export function forgetColors() {
  resolved.clear();
}

/** The text beside a section's heading. */
export function setNote(section, text) {
  section.querySelector("header .note").textContent = text;
}

/** Sizes a canvas for the screen's pixel density and returns its context in CSS pixels. */
export function prepareCanvas(canvas, width, height) {
  const density = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return context;
}

/** The next of 1, 2, 5 times a power of ten: a distance between the labels of an axis. */
export function roundStep(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999) * power;
}

/** Shows a tip near a place in a box, inside of the box. */
export function placeTip(tip, box, x, y, text) {
  tip.hidden = false;
  tip.textContent = text;
  const left = Math.min(Math.max(0, x + 14), Math.max(0, box.clientWidth - tip.offsetWidth - 2));
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(0, y - tip.offsetHeight - 10)}px`;
}
