// The output of a rank: the last lines of its log, by rank and attempt.
import { el, fill, setNote } from "./dom.js";

/** Shows the log tail that `load(rank, attempt)` fetches; it follows the end unless the reader has scrolled up. */
export class LogTail {
  constructor(section, load) {
    this.section = section;
    this.load = load;
    this.rank = el("select", { "aria-label": "Rank", onchange: () => this.refresh() });
    this.attempt = el("select", { "aria-label": "Attempt", onchange: () => this.refresh() });
    this.text = el("pre", { class: "log", tabindex: 0, "aria-label": "Output of the rank" });
    section.querySelector(".tools").append(this.rank, this.attempt);
    section.querySelector(".body").append(this.text);
  }

  /** Offers the ranks and attempts of a run. */
  offer(run) {
    const ranks = run.ranks.length ? run.ranks : [0];
    setOptions(this.rank, ranks.slice(0, 1024).map((rank) => [String(rank), `rank ${rank}`]));
    setOptions(this.attempt, [["", "newest attempt"],
      ...[...run.attempts].reverse().map((attempt) => [String(attempt.number), `attempt ${attempt.number}`])]);
  }

  choose(rank) {
    this.rank.value = String(rank);
    this.refresh();
  }

  async refresh() {
    const answer = await this.load(this.rank.value || "0", this.attempt.value);
    if (!answer) return;
    const follows = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 24;
    setNote(this.section, answer.lines.length ? `attempt ${answer.attempt}, the last ${answer.lines.length === 1 ? "line" : `${answer.lines.length} lines`}` : "");
    const text = answer.lines.join("\n") || (answer.found ? "The rank has printed nothing so far." : "There is no log of this rank: ranks that torchrun starts print to their terminal.");
    if (this.text.textContent !== text) this.text.textContent = text;
    if (follows) this.text.scrollTop = this.text.scrollHeight;
  }
}

function setOptions(select, options) {
  const chosen = select.value;
  fill(select, options.map(([value, text]) => el("option", { value }, text)));
  select.value = options.some(([value]) => value === chosen) ? chosen : options[0][0];
}
