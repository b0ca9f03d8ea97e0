// The practice page: which place is shown, and the lists of today, the deck, the progress and the handbook.

import { el } from "/static/dom.js";
import * as format from "/static/format.js";
import { get } from "/static/practice_api.js";
import { cardView } from "/static/practice_card.js";
import { cardItem, kindBadge, section } from "/static/practice_text.js";

const main = document.getElementById("main");
const seen = new Set(); // cards of this review that stay in the queue: their experiment failed, or they are wrong here
let reviewed = 0;

const figure = (value, note) => el("div", {}, el("span", { class: "figure" }, String(value)), el("span", { class: "note" }, note));

/** What happened to the progress file, such as that it was damaged; null if nothing did. */
const notices = (messages) => (messages.length ? section("Progress file", messages.map((message) => el("p", { class: "message" }, message))) : null);

async function today() {
  const queue = await get("/api/queue");
  const count = queue.cards.length;
  const title = count ? `${count} card${count === 1 ? "" : "s"} for today` : "Nothing is left for today";
  const lead = count ? "Predict a number, run the experiment on this machine, and see why it is so."
    : `${queue.next_due ? `The next card is due ${queue.next_due}. ` : ""}Every card can be run at any time.`;
  const start = count ? el("a", { class: "primary", href: "#/review" }, reviewed ? "Go on" : "Start the review") : el("a", { class: "primary", href: "#/deck" }, "All cards");
  const head = el("section", { class: "card" }, el("div", { class: "stack-y" }, el("h1", {}, title), el("p", { class: "lead" }, lead),
    el("div", { class: "figures" }, figure(queue.due, "due"), figure(queue.new, "new"), figure(queue.reviewed_today, "reviewed today"),
      figure(`${queue.begun} / ${queue.total}`, "cards begun")),
    el("div", { class: "meter", role: "img", "aria-label": `${queue.begun} of ${queue.total} cards begun` },
      el("i", { style: { width: `${(100 * queue.begun) / (queue.total || 1)}%` } })),
    queue.postponed ? el("p", { class: "note" }, `${queue.postponed} more cards are due and wait for tomorrow.`) : null,
    el("div", { class: "row" }, start)));
  return [notices(queue.messages), head, count ? section("The queue", el("ul", { class: "cards" }, queue.cards.map(cardItem))) : null];
}

async function review() {
  const queue = await get("/api/queue");
  const left = queue.cards.filter((card) => !seen.has(card.card));
  if (!left.length) {
    location.hash = "#/";
    return today();
  }
  const position = `${reviewed + 1} of ${reviewed + left.length}`;
  return cardView(left[0].card, { position, next: "#/review", nextLabel: "Next card", done: (card) => { seen.add(card); reviewed += 1; } });
}

async function deck() {
  const { kinds } = await get("/api/deck");
  if (!kinds.length) return [el("p", { class: "empty" }, "There are no cards.")];
  return kinds.map(({ kind, cards }) => el("section", { class: "card" },
    el("header", {}, el("h2", {}, kindBadge(kind)), el("span", { class: "note" }, `${cards.length} card${cards.length === 1 ? "" : "s"}`)),
    el("ul", { class: "cards" }, cards.map(cardItem))));
}

const COMMANDS = { labs: "meshwright practice lab", incidents: "meshwright practice incident", interviews: "meshwright practice interview" };

/** A section of the progress file as a table of whatever plain values its entries have. */
function progressSection(name, { entries, done }) {
  const title = name[0].toUpperCase() + name.slice(1);
  if (!entries.length) return section(title, el("p", { class: "empty" }, "None has been begun: ", el("code", {}, COMMANDS[name])));
  const names = [...new Set(entries.flatMap((entry) => Object.keys(entry.fields)))];
  const columns = names.filter((column) => !(column.endsWith("_passed") && names.includes(column.slice(0, -7)))).slice(0, 6);
  const cell = (fields, column) => (`${column}_passed` in fields ? `${fields[`${column}_passed`]} of ${fields[column]}` : show(fields[column]));
  const show = (value) => (value === true ? el("span", { class: "right" }, "yes") : value === false ? el("span", { class: "faint" }, "no") : value === undefined ? "–" : typeof value === "number" && value > 1e9 && value < 1e11 ? format.clock(value) : String(value));
  return section(title,
    el("p", { class: "note" }, `${done} done of ${entries.length} begun`),
    el("div", { class: "meter" }, el("i", { style: { width: `${(100 * done) / entries.length}%` } })),
    el("div", { class: "wide" }, el("table", { class: "labs" },
      el("thead", {}, el("tr", {}, el("th", {}, "name"), columns.map((column) => el("th", {}, column.replace(/_/g, " "))))),
      el("tbody", {}, entries.map((entry) => el("tr", {}, el("td", {}, entry.name), columns.map((column) => el("td", {}, cell(entry.fields, column)))))))));
}

async function progress() {
  const [{ sections, messages }, queue] = await Promise.all([get("/api/progress"), get("/api/queue")]);
  const cards = section("Cards", el("div", { class: "figures" }, figure(queue.begun, `of ${queue.total} begun`), figure(queue.due + queue.postponed, "due"),
    figure(queue.reviewed_today, "reviewed today"), figure(queue.next_due || "–", "next due")));
  return [notices(messages), cards, ...Object.entries(sections).map(([name, found]) => progressSection(name, found))];
}

async function handbook(name) {
  if (!name) {
    const { chapters } = await get("/api/handbook");
    if (!chapters.length) {
      return [section("Handbook", el("p", {}, "The chapters are not installed with this package. They are in ", el("code", {}, "docs/handbook"), " of the source."))];
    }
    return [section("Handbook", el("ul", { class: "chapters" }, chapters.map((chapter) => el("li", {}, el("a", { href: `#/handbook/${chapter.name}` }, chapter.title)))))];
  }
  const chapter = await get(`/api/handbook/${encodeURIComponent(name)}`);
  const prose = el("article", { class: "prose" });
  prose.innerHTML = chapter.html; // rendered by the server from its own files, without raw HTML
  return [el("p", {}, el("a", { href: "#/handbook" }, "All chapters")), el("section", { class: "card" }, prose)];
}

const PLACES = { "": ["today", today], review: ["today", review], deck: ["deck", deck], card: ["deck", (id) => cardView(id)], progress: ["progress", progress], handbook: ["handbook", handbook] };

/** Shows the place that the address names. */
async function route() {
  const [name, argument] = location.hash.replace(/^#\/?/, "").split("/");
  const [place, view] = PLACES[name] ?? PLACES[""];
  const at = location.hash;
  for (const link of document.querySelectorAll("#places a")) {
    if (link.dataset.place === place) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  let content = [];
  try {
    content = await view(argument === undefined ? undefined : decodeURIComponent(argument));
  } catch (error) {
    content = [section("This cannot be shown", el("p", { class: "message" }, error.message))];
  }
  if (location.hash !== at && name !== "review") return; // the reader has gone elsewhere meanwhile
  main.replaceChildren(...content.filter(Boolean));
  window.scrollTo(0, 0);
  main.querySelector("input[type=text]")?.focus({ preventScroll: true });
}

const darkQuery = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (darkQuery.matches ? "dark" : "light")) === "dark";
const themeButton = document.getElementById("theme");

themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("meshwright-theme", theme); } catch { /* the choice lasts until the page is closed */ }
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#/']");
  if (link && link.getAttribute("href") === location.hash) route(); // the same place again: the next card of the review
});
window.addEventListener("hashchange", route);
route();
