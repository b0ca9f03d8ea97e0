// The keys of the page, and the dialog that lists them.
import { el } from "./dom.js";

const typing = (target) => target.closest?.("input, select, textarea, dialog[open]") !== null;

/** Connects keys to actions: [keys, what they do, action]. */
export function connectKeys(bindings) {
  const dialog = document.getElementById("keys");
  const close = () => dialog.close();
  const open = () => (dialog.open ? dialog.close() : dialog.showModal());
  const all = [...bindings, [["?"], "show or close this list", open]];
  dialog.querySelector("dl").append(...all.flatMap(([keys, text]) => [
    el("dt", {}, keys.flatMap((key, index) => [index ? " " : "", el("kbd", {}, key)])), el("dd", {}, text)]));
  document.getElementById("keys-close").addEventListener("click", close);
  document.getElementById("help").addEventListener("click", open);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing(event.target) && !(event.key === "?" && dialog.open)) return;
    const binding = all.find(([keys]) => keys.includes(event.key));
    if (!binding) return;
    event.preventDefault();
    binding[2](event.key);
  });
}
