// Text of cards as elements: `code` in backquotes, paragraphs, and the marks of cards.

import { el } from "/static/dom.js";

/** A line of text in which parts in backquotes are code. */
export function inline(text) {
  return text.split("`").map((part, number) => (number % 2 ? el("code", {}, part) : part));
}

/** Paragraphs; a single line break is a space unless a list follows. */
export function paragraphs(text, options = {}) {
  return text.trim().split(/\n\s*\n/).map((part) =>
    el("p", options, part.split(/\n(?=[-*] |\d+[.)] )/).map((line, number) => [number ? el("br") : null, inline(line.replace(/\n/g, " "))])));
}

export const kindBadge = (kind) => el("span", { class: "kind", "data-kind": kind }, kind);

/** A card in a list. */
export function cardItem(card) {
  const tag = card.is_due ? "due" : card.is_new ? "new" : "";
  return el("li", {}, el("a", { href: `#/card/${encodeURIComponent(card.card)}` },
    el("span", { class: "question" }, inline(card.question)),
    el("span", { class: "under" }, kindBadge(card.kind), el("span", { class: "mono" }, card.card),
      card.ratings.length ? el("span", { class: "dots", title: `ratings: ${card.ratings.join(", ")}` }, card.ratings.map((rating) => el("i", { class: rating }))) : null,
      el("span", { class: `tag ${tag}` }, card.state))));
}

export function section(title, ...children) {
  return el("section", { class: "card" }, el("header", {}, el("h2", {}, title)), ...children);
}
