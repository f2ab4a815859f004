// What several pages show alike.

import { h, name, plain } from "./dom.js";
import { count, exactly, when } from "./format.js";

export const TIERS = ["priority", "default", "flex", "batch"];

export const heading = (title, ...more) => h("div", { class: "head", "data-key": "h1" }, h("h1", null, title), more);
export const card = (title, props, ...children) => h("section", { class: `card ${props?.class ?? ""}`, "data-key": props?.key ?? title }, title ? h("h2", null, title) : null, ...children);
export const empty = (...text) => h("p", { class: "dim empty" }, ...text);
export const note = (tone, ...text) => h("p", { class: `note ${tone}` }, ...text);

// columns: [title, class]; rows: [{key, cells}] or lists of cells
export function table(columns, rows, { label, none = "None." } = {}) {
  if (!rows.length) return empty(none);
  const heads = columns.map((column) => [column].flat());
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, heads.map(([title, kind]) => h("th", { scope: "col", class: kind }, title || h("span", { class: "sr" }, "Actions"))))),
      h("tbody", null, rows.map((row) => {
        const cells = row.cells ?? row;
        return h("tr", { "data-key": row.key, class: row.class }, cells.map((cell, i) => h(i ? "td" : "th", i ? { class: heads[i]?.[1] } : { scope: "row" }, cell)));
      })),
    ),
  );
}

const TONES = {
  queued: "wait", in_progress: "run", completed: "ok", failed: "bad", cancelled: "dim", incomplete: "warn",
  ready: "ok", draining: "warn", unready: "bad", active: "ok", disabled: "warn", expired: "dim", revoked: "dim",
  due: "wait", delivered: "ok", dead: "bad", starting: "run", done: "ok", validating: "run", finalizing: "run",
  cancelling: "warn", pinned: "warn", preparing: "wait", judging: "run", paused: "warn", promoted: "ok", rolled_back: "bad", aborted: "warn",
  worse: "bad", "looks worse": "warn", normal: "ok", shed: "warn", shorten: "warn", priority: "bad",
};
export const state = (text) => h("span", { class: `state ${TONES[text] ?? "dim"}` }, plain(text ?? "unknown").replace("_", " "));

export const moment = (at, now) => h("time", { title: exactly(at), datetime: at > 0 ? new Date(at * 1000).toISOString() : null }, when(at, now));
export const taskLink = (id, text) => h("a", { href: `#/tasks/${encodeURIComponent(id)}`, class: "mono", title: plain(id) }, plain(text ?? short(id)));
export const short = (id) => (id.length > 14 ? `${id.slice(0, 6)}…${id.slice(-6)}` : id);
export const link = (hash, text) => h("a", { href: hash }, text);

// A number with its name below.
export const figure = (value, unit, label, more) =>
  h("div", { class: "figure" }, h("b", null, value, unit ? h("small", null, `\u202f${unit}`) : null), h("span", null, label), more);

export const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(Boolean).map(([title, value]) => h("div", null, h("dt", null, title), h("dd", null, value))));

// A text that may have a megabyte: its beginning, and how much more there is.
export function long(text, most = 20000) {
  const whole = String(text);
  const shown = plain(whole.slice(0, most));
  return [h("pre", { class: "text", dir: "auto", tabindex: "0" }, shown), whole.length > most ? h("p", { class: "dim" }, `The first ${count(most)} of ${count(whole.length)} characters.`) : null];
}

// A command to copy.
export function copyable(text, label = "Copy") {
  const copy = async (event) => {
    const button = event.currentTarget;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(button.previousSibling);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected: copy it";
    }
    setTimeout(() => (button.textContent = label), 2500);
  };
  return h("div", { class: "code" }, h("pre", { tabindex: "0" }, text), h("button", { type: "button", class: "quiet", on: { click: copy } }, label));
}

// Its text is its key: a button that goes or comes beside it does not become another under a finger.
export const button = (text, act, kind = "") => h("button", { type: "button", class: kind, "data-key": text, on: { click: act } }, text);
// A choice among few, as links that keep the rest of the query.
export const tabs = (hash, query, field, choices, chosen, label) =>
  h("nav", { class: "tabs", "aria-label": label }, choices.map(([value, text]) => {
    const next = new URLSearchParams(query);
    if (value) next.set(field, value);
    else next.delete(field);
    next.delete("after");
    return h("a", { href: `${hash}?${next}`, "aria-current": (chosen ?? "") === value ? "true" : null }, text);
  }));

export const modelName = (text) => name(text, { most: 40 });

// A model's or pool's name within a path.
export const pathOf = (text) => text.split("/").map(encodeURIComponent).join("/");
let fieldNumber = 0;
// A field of a question, with its label.
export function field(title, make) {
  const id = `field-${++fieldNumber}`;
  return h("div", null, h("label", { for: id }, title), make(id));
}
