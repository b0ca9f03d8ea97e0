// One card: predict, run, see, explain; and the knobs to play with afterwards.

import { el } from "/static/dom.js";
import * as format from "/static/format.js";
import { get, runExperiment } from "/static/practice_api.js";
import { inline, kindBadge, paragraphs, section } from "/static/practice_text.js";
import { drawPicture } from "/static/pictures.js";

const RATINGS = { easy: ["right", "good"], good: ["right", "good"], hard: ["near", "warn"], again: ["wrong", "bad"] };
const LIMIT_SECONDS = 20;

/** Draws a picture again when its container changes its width. */
function pictureBox(picture) {
  const box = el("div");
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (!box.isConnected) { if (width) observer.disconnect(); return; }
    if (Math.abs(box.clientWidth - width) < 2 || !box.clientWidth) return;
    width = box.clientWidth;
    box.replaceChildren(drawPicture(picture, width));
  });
  observer.observe(box);
  return box;
}

function relationItem(relation) {
  if (!relation.judged) {
    const why = "stated for the default settings; this run does not decide it";
    return el("li", {}, el("span", { class: "faint", "aria-label": why, title: why }, "·"), el("span", {}, inline(relation.text)),
      el("span", { class: "sides" }, relation.sides));
  }
  const right = relation.holds === relation.must_hold;
  const verdict = relation.must_hold ? (relation.holds ? "" : "does not hold") : relation.holds ? "is not refuted" : "refuted";
  return el("li", {}, el("span", { class: right ? "right" : "wrong", "aria-label": right ? "as stated" : "not as stated" }, right ? "✓" : "✗"),
    el("span", {}, inline(relation.text), verdict ? el("span", { class: right ? "faint" : "wrong" }, ` — ${verdict}`) : null),
    el("span", { class: "sides" }, relation.sides));
}

/** What an experiment has measured, or why there is nothing. */
function measured(card, result) {
  const parts = [];
  if (result.failure) {
    parts.push(el("div", { class: "alarm" }, el("b", {}, "The experiment has no result."), el("span", {}, result.failure),
      result.log ? el("pre", { class: "log" }, result.log) : null));
    return parts;
  }
  if (result.problems.length) {
    parts.push(el("div", { class: "alarm" }, el("b", {}, `The card ${card.card} is wrong on this machine. Please report it.`),
      result.problems.map((problem) => el("span", {}, problem))));
  }
  parts.push(pictureBox(result.picture));
  parts.push(...result.notes.map((note) => el("p", { class: "small faint" }, inline(note))));
  if (result.relations.length) parts.push(el("ul", { class: "relations" }, result.relations.map(relationItem)));
  parts.push(el("p", { class: "note" }, `The experiment took ${format.seconds(result.seconds)}${result.peak_bytes ? `, peak memory ${format.bytes(result.peak_bytes)}` : ""}.`));
  return parts;
}

function grades(result) {
  const parts = [];
  if (result.predictions.length) {
    parts.push(el("table", { class: "grades" },
      el("thead", {}, el("tr", {}, el("th"), ["predicted", "measured", "error"].map((name) => el("th", { class: "number" }, name)))),
      el("tbody", {}, result.predictions.map((item) => el("tr", {}, el("td", {}, inline(item.question), item.unit ? el("span", { class: "unit" }, ` [${item.unit}]`) : null),
        el("td", { class: "number", "data-name": "predicted" }, item.predicted), el("td", { class: "number", "data-name": "measured" }, item.measured),
        el("td", { class: `number ${RATINGS[item.rating][0]}`, "data-name": "error" }, item.error))))));
  }
  if (result.claims.length) {
    parts.push(el("ul", { class: "relations" }, result.claims.map((claim) => el("li", {},
      el("span", { class: claim.chosen === claim.true ? "right" : "wrong" }, claim.chosen === claim.true ? "✓" : "✗"),
      el("span", {}, inline(claim.text)),
      el("span", { class: "sides" }, `${claim.true ? "true" : "false"}, and you said ${claim.chosen ? "true" : "false"}`)))));
  }
  return parts;
}

function explanation(value, chapter) {
  const name = (chapter || "").match(/([\w-]+)\.md/);
  return section("Explanation", el("div", { class: "answer-text" },
    paragraphs(value.answer, { class: "short" }),
    paragraphs(value.notes),
    el("div", { class: "mistake" }, el("h3", {}, "Common mistake"), paragraphs(value.mistake)),
    el("div", {}, el("h3", {}, "Sources"), el("ul", { class: "sources" }, value.sources.map((source) =>
      el("li", {}, `${source.title} (${source.kind}): `, /^https:\/\//.test(source.where)
        ? el("a", { href: source.where, rel: "noreferrer", target: "_blank" }, source.where) : el("code", {}, source.where))))),
    name ? el("p", {}, el("a", { href: `#/handbook/${name[1]}` }, "Read the chapter of the handbook")) : null));
}

/** A running experiment: seconds, memory, and whether it waits for another one. */
function progressBox() {
  const meter = el("i", { style: { width: "0%" } });
  const note = el("span", { class: "note", role: "status" }, "The experiment is being started.");
  const box = el("div", { class: "running" }, el("div", { class: "meter" }, meter), note);
  return { box, update(job) {
    if (job.state === "waiting") note.textContent = "The experiment waits for its turn.";
    else if (!job.seconds) note.textContent = "The experiment is being started; the first one waits until torch is imported.";
    else note.textContent = `The experiment runs: ${job.seconds.toFixed(1)} s, ${format.bytes(job.bytes)}.`;
    meter.style.width = `${Math.min(100, (100 * job.seconds) / LIMIT_SECONDS)}%`;
  } };
}

/** Selects for the knobs of a card, and the experiment again with what they say. */
function playground(card) {
  const selects = card.knobs.map((knob) => [knob, el("select", { name: knob.name }, knob.values.map((value) => el("option", { value: String(value) }, String(value))))]);
  const result = el("div", { class: "stack-y", "aria-live": "polite" });
  const button = el("button", { type: "button", class: "again" }, "Run again");
  button.addEventListener("click", async () => {
    const progress = progressBox();
    result.replaceChildren(progress.box);
    button.disabled = true;
    try {
      const knobs = Object.fromEntries(selects.map(([knob, select]) => [knob.name, select.value]));
      result.replaceChildren(...measured(card, await runExperiment({ card: card.card, knobs }, progress.update)));
    } catch (error) {
      result.replaceChildren(el("p", { class: "message" }, error.message));
    }
    button.disabled = false;
  });
  const labels = selects.map(([knob, select]) => el("label", {}, el("b", {}, knob.name), inline(knob.meaning), select));
  const title = card.knobs.length ? "Play with the knobs" : "Run it again";
  return section(title, el("div", { class: "stack-y" }, el("div", { class: "knobs" }, labels, button), result));
}

/** The form of a card: a number per prediction and a choice of claims. */
function questionForm(card, submit, read) {
  const inputs = card.predictions.map(() => el("input", { type: "text", autocomplete: "off", inputmode: "text", placeholder: "number or formula" }));
  const boxes = card.claims.map((claim) => [claim.letter, el("input", { type: "checkbox" })]);
  const message = el("p", { class: "message", role: "alert", hidden: true });
  const button = el("button", { type: "submit", class: "primary" }, "Run the experiment");
  const form = el("form", { class: "predict", novalidate: true },
    card.predictions.map((item, number) => el("label", { class: "number-field" }, el("span", {}, inline(item.question)),
      el("span", { class: "field" }, inputs[number], el("span", { class: "unit" }, item.unit)))),
    card.claims.length ? el("fieldset", {}, el("legend", {}, "Which of these claims are true?"),
      card.claims.map((claim, number) => el("label", { class: "claim" }, boxes[number][1], el("span", {}, inline(claim.text))))) : null,
    message, el("div", { class: "row" }, button, el("button", { type: "button", class: "plain", onclick: read }, "Read without running")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    message.hidden = true;
    const chosen = boxes.filter(([, box]) => box.checked).map(([letter]) => letter);
    const answers = [...inputs.map((input) => input.value), ...(boxes.length ? [chosen.join(" ") || "none"] : [])];
    button.disabled = true;
    try {
      await submit(answers);
    } catch (error) {
      message.textContent = error.message;
      message.hidden = false;
      if (!form.isConnected) throw error; // the form has made way for a result that cannot be shown
      button.disabled = false;
    }
  });
  return form;
}

/** Shows a card; `next` is the address of what follows, and `position` says where it is in the review. */
export async function cardView(id, { position = "", next = "#/deck", nextLabel = "All cards", done = () => {} } = {}) {
  const card = await get(`/api/cards/${encodeURIComponent(id)}`);
  const settings = card.knobs.map((knob) => `${knob.name} = ${knob.values[0]}`).join(", ");
  const ranks = `${card.ranks} rank${card.ranks === 1 ? "" : "s"}`;
  const after = el("div", { class: "stack-y" });
  const place = el("div");
  const again = () => el("a", { class: "primary", href: next }, nextLabel);

  async function read() {
    const value = await get(`/api/cards/${encodeURIComponent(id)}/explanation`);
    place.replaceChildren(el("p", { class: "note" }, "The card is shown without a grade."));
    after.replaceChildren(explanation(value, card.chapter), playground(card), el("div", { class: "row" }, again()));
  }

  async function submit(answers) {
    const progress = progressBox();
    let result = null;
    const running = runExperiment({ card: card.card, answers }, (job) => {
      if (!progress.box.isConnected) place.append(progress.box);
      progress.update(job);
    });
    try {
      result = await running;
    } finally {
      progress.box.remove();
    }
    done(card.card);
    const rated = result.recorded
      ? el("div", { class: "row" }, el("span", { class: `badge ${RATINGS[result.rating][1]}` }, result.rating), el("span", {}, `The card is due ${result.due}.`))
      : el("p", { class: "message" }, result.reason ? `The review is not recorded: ${result.reason}` : "The review is not recorded.");
    place.replaceChildren(el("div", { class: "stack-y" }, rated, ...(result.graded ? grades(result) : [])));
    after.replaceChildren(section("Measured", el("div", { class: "stack-y" }, measured(card, result))),
      ...(result.graded ? [explanation(result.explanation, card.chapter)] : []), playground(card), el("div", { class: "row" }, again()));
  }

  place.append(questionForm(card, submit, read));
  const head = el("section", { class: "card" }, el("div", { class: "stack-y" },
    el("div", { class: "row" }, kindBadge(card.kind), el("span", { class: "mono faint" }, card.card),
      el("span", { class: "note" }, position || card.state)),
    el("h1", { class: "asked" }, inline(card.question.trim().replace(/\s+/g, " "))),
    el("p", { class: "note" }, `The experiment runs on ${ranks} of this machine${settings ? `, with ${settings}` : ""}.`), place));
  return [head, after];
}
