// The frame around all pages: where the reader is, who asks, what is fresh.
//
//   location.hash ─▶ a page of PAGES ─ load(ctx) ─▶ data ─ draw(data, ctx) ─▶ nodes ─▶ patch(main)
//
// A page is {title, load, draw, every}: `load` asks the gateway, `draw` makes nodes of what it said, and both run again
// after `every` ms (or what it returns for the data) while the page can be seen: seldom, where the store has to read
// much. A page with `follow` takes events beside that. A page with `mount` looks after itself.

import * as api from "./api.js";
import { h, patch, plain } from "./dom.js";
import { seconds } from "./format.js";
import { batches } from "./batches.js";
import { deadLetters } from "./dead_letters.js";
import { keys } from "./keys.js";
import { models } from "./models.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";
import { queues } from "./queues.js";
import { scaling } from "./scaling.js";
import { task } from "./task.js";
import { tasks } from "./tasks.js";
import { usage } from "./usage.js";
import { webhooks } from "./webhooks.js";
import { workers } from "./workers.js";

// path, page, scope without which the page is not shown, letter after g
const PAGES = [
  ["", overview, "metrics", "o"],
  ["queues", queues, "metrics", "q"],
  ["workers", workers, "metrics", "w"],
  ["models", models, "read", "m"],
  ["tasks", tasks, "read", "t"],
  ["dead-letters", deadLetters, "admin", "d"],
  ["scaling", scaling, "metrics", "s"],
  ["batches", batches, "read", "b"],
  ["webhooks", webhooks, "read", "h"],
  ["usage", usage, "read", "u"],
  ["keys", keys, "admin", "k"],
  ["playground", playground, "submit", "p"],
];
const $ = (id) => document.getElementById(id);
const main = $("main");
const THEMES = ["auto", "light", "dark"];
const SELDOM_MS = 60000; // most between two questions whose answer is a refusal

let caller = null;
let current = null; // {page, path, rest, query, stop, timer, data, error, refusals, freshAt, failedAt}
let skew = 0; // the store's clock less ours, s

// ---- what pages are given ----

const ctx = {
  api,
  get caller() {
    return caller;
  },
  may: (scope) => caller !== null && (caller.scopes.includes(scope) || caller.scopes.includes("admin")),
  now: () => Date.now() / 1000 + skew,
  // Take the store's clock from an answer that has it.
  clock(at) {
    if (typeof at === "number" && at > 0) skew = at - Date.now() / 1000;
  },
  get rest() {
    return current?.rest ?? [];
  },
  get query() {
    return current?.query ?? new URLSearchParams();
  },
  // Aborted when this page is left.
  get left() {
    return current?.stop.signal ?? AbortSignal.abort();
  },
  // Go to another part of this page: its query.
  go(hash) {
    location.hash = hash;
  },
  refresh: () => refresh(),
  redraw: () => show(),
  say,
  confirm,
  ask: askKey,
};

// ---- pages ----

function readHash() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts, query: new URLSearchParams(query) };
}

function chosen(parts) {
  if (parts[0] === "tasks" && parts[1]) return [`tasks`, task, "read"];
  return PAGES.find(([path]) => path === parts[0]);
}

function navigate() {
  if (caller === null) return;
  const { parts, query } = readHash();
  const match = chosen(parts);
  leave();
  drawNav(match?.[0]);
  if (!match) {
    document.title = "Not found · Penstock";
    patch(main, [h("h1", null, "There is no such page"), h("p", null, h("a", { href: "#/" }, "To the overview"))]);
    return;
  }
  const [path, page, scope] = match;
  const stop = new AbortController();
  current = { page, path, rest: parts.slice(1), query, stop, data: null, refusals: 0, failedAt: null, freshAt: null };
  document.title = `${page.title} · Penstock`;
  if (!ctx.may(scope)) {
    main.replaceChildren(
      h("h1", null, page.title),
      h("p", { class: "note" }, `This key lacks the scope “${scope}”, which this page needs. `, h("button", { type: "button", on: { click: askKey } }, "Use another key")),
    );
    return;
  }
  main.replaceChildren(h("h1", { "data-key": "h1" }, page.title), h("p", { class: "dim", "data-key": "wait" }, "Reading…"));
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  if (page.mount) {
    main.replaceChildren(...page.mount(ctx, stop.signal));
    fresh();
  } else {
    refresh();
    follow();
  }
}

// Let a page that has events take them while it can be seen.
function follow() {
  const here = current;
  if (!here?.page.follow || here.following || document.hidden) return;
  const following = (here.following = new AbortController());
  here.page.follow(ctx, AbortSignal.any([following.signal, here.stop.signal])).catch(console.error);
}

function hide() {
  current?.following?.abort();
  if (current) current.following = null;
}

function leave() {
  if (!current) return;
  current.stop.abort();
  clearTimeout(current.timer);
  current = null;
}

// `anew`: what a load on its way will say is from before a change: another one takes its place.
async function refresh(anew = false) {
  const here = current;
  if (!here || here.page.mount || (here.loading && !anew)) return;
  clearTimeout(here.timer);
  here.loading?.abort();
  const loading = (here.loading = new AbortController());
  const outdated = () => here !== current || here.loading !== loading;
  try {
    const data = await here.page.load(ctx, AbortSignal.any([here.stop.signal, loading.signal]));
    if (outdated()) return;
    here.data = data;
    here.failedAt = null;
    here.error = null;
    here.refusals = 0;
    here.freshAt = performance.now();
    show();
  } catch (error) {
    if (outdated() || here.stop.signal.aborted) return;
    here.error = error;
    here.failedAt ??= performance.now();
    here.refusals = lasting(error) ? here.refusals + 1 : 0;
    if (error instanceof api.Refused && error.status === 401) return askKey(api.hasKey() ? error.message : null);
    show();
    if (!(error instanceof api.Refused)) console.error(error);
  } finally {
    if (here.loading === loading) {
      here.loading = null;
      if (here === current && here.page.every && !document.hidden)
        here.timer = setTimeout(refresh, pause(interval(here), here.error, here.refusals));
      fresh();
    }
  }
}

// What is refused for what it asks, and not for the moment, is seldom answered a moment later.
const lasting = ({ status }) => status >= 400 && status < 500 && ![401, 408, 429].includes(status);

// Time (ms) until it is asked again: twice as long after each such refusal, and no sooner than the gateway says.
function pause(usual, error, refusals) {
  const asked = refusals ? usual * 2 ** refusals : 1000 * (error?.retryAfter ?? 0);
  return Math.max(usual, Math.min(asked, SELDOM_MS));
}

const interval = ({ page, data }) => (typeof page.every === "function" ? page.every(data, ctx) : page.every);

function show() {
  const here = current;
  if (!here || here.page.mount) return;
  const { page, data, error } = here;
  const nodes = data === null ? [h("h1", { "data-key": "h1" }, page.title)] : page.draw(data, ctx).filter(Boolean);
  if (error) {
    const gone = data === null;
    const again = here.refusals ? " Asked again after longer and longer pauses, up to a minute." : " Asked again every few seconds.";
    const old = here.freshAt === null ? "" : ` What is below was read ${seconds((performance.now() - here.freshAt) / 1000)} ago.`;
    nodes.splice(1, 0, h("p", { class: "note bad", "data-key": "stale", role: gone ? "alert" : null }, h("b", null, gone ? "This cannot be shown. " : "Not up to date. "), plain(error.message), /[.!?]$/.test(error.message) ? "" : ".", old, page.every ? again : ""));
  }
  patch(main, nodes);
}

// "Live", or since when it is not.
function fresh() {
  const at = $("live");
  const here = current;
  const stale = here?.failedAt;
  const age = here?.freshAt ? (performance.now() - here.freshAt) / 1000 : null;
  const text = stale ? `Stale${age === null ? "" : ` for ${seconds(Math.floor(age))}`}` : here?.page.every ? "Live" : "";
  if (at.textContent !== text) at.textContent = text;
  at.classList.toggle("stale", Boolean(stale));
}

function drawNav(path) {
  const links = PAGES.filter(([, , scope]) => ctx.may(scope)).map(([to, page, , letter]) =>
    h("li", null, h("a", { href: `#/${to}`, "aria-current": to === path ? "page" : null, "aria-keyshortcuts": `g ${letter}` }, page.title)),
  );
  const more = [h("li", { class: "end" }, h("a", { href: "docs" }, "API"))];
  patch($("nav"), [h("ul", null, links, more)]);
  $("nav").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone
}

// ---- asking ----

function dialog(title, body, buttons) {
  const box = $("ask");
  return new Promise((resolve) => {
    const done = (value) => {
      box.onclose = null;
      box.close();
      resolve(value);
    };
    const form = h(
      "form",
      { on: { submit: (event) => (event.preventDefault(), done(new FormData(form))) } },
      h("h2", { id: "ask-title" }, title),
      body,
      h("div", { class: "buttons" }, h("button", { type: "button", class: "quiet", on: { click: () => done(null) } }, "Cancel"), buttons),
    );
    box.replaceChildren(form);
    box.onclose = () => box.open || resolve(null); // the event of the dialog before comes late
    if (!box.open) box.showModal();
  });
}

// Ask once before something is changed: what it will do, in words, and with `fields` how. `run` does it, given the form;
// its text says what was done.
async function confirm({ title, text, fields = [], verb, danger = false, run }) {
  const body = [...[text].flat().map((line) => h("p", null, line)), ...fields];
  const sure = await dialog(title, body, h("button", { type: "submit", class: danger ? "danger" : "primary" }, verb));
  if (sure === null) return;
  try {
    say(await run(sure));
  } catch (error) {
    say(error.message, true);
  }
  refresh(true);
}

let saying;
function say(text, bad = false) {
  const toast = $("said");
  toast.textContent = plain(text ?? "");
  toast.classList.toggle("bad", bad);
  toast.hidden = !text;
  clearTimeout(saying);
  saying = setTimeout(() => (toast.hidden = true), bad ? 12000 : 6000);
}

let asking = false;
async function askKey(problem) {
  if (asking) return;
  asking = true;
  let key;
  leave();
  try {
    const body = [
      typeof problem === "string" ? h("p", { class: "note bad" }, plain(problem)) : null,
      h("p", null, "This gateway asks for an API key. It is kept in this page's memory alone: a reload forgets it."),
      h("label", { for: "ask-key" }, "API key"),
      h("input", { id: "ask-key", name: "key", type: "password", autocomplete: "off", required: true, placeholder: "psk_…", spellcheck: "false" }),
      h("p", { class: "dim" }, "What it may see and do is shown: ", h("code", null, "metrics"), " the fleet, ", h("code", null, "read"), " its tenant's tasks, ", h("code", null, "admin"), " everything. Made by ", h("code", null, "penstock keys create TENANT"), "."),
    ];
    const form = await dialog("Key", body, h("button", { type: "submit", class: "primary" }, "Use it"));
    if (form === null) return idle();
    key = String(form.get("key")).trim();
  } finally {
    asking = false;
  }
  // No header can have another character, such as one without a width that was copied along.
  if (/[^\x21-\x7e]/.test(key)) return askKey("This is no key: it has a character that no key has.");
  api.setKey(key);
  await begin();
}

function idle() {
  if (caller !== null) return navigate();
  patch(main, [h("h1", null, "Penstock"), h("p", null, "This gateway asks for a key. ", h("button", { type: "button", class: "primary", on: { click: () => askKey() } }, "Type a key"))]);
}

// ---- start ----

let refusals = 0;
async function begin() {
  try {
    caller = await api.get("v1/whoami");
    refusals = 0;
  } catch (error) {
    caller = null;
    if (error.status === 401) return askKey(api.hasKey() ? error.message : null);
    const again = h("button", { type: "button", on: { click: begin } }, "Ask again");
    patch(main, [h("h1", null, "Penstock"), h("p", { class: "note bad", role: "alert" }, plain(error.message), " ", again)]);
    refusals = lasting(error) ? refusals + 1 : 0;
    setTimeout(() => caller === null && !asking && begin(), pause(5000, error, refusals));
    return;
  }
  const button = $("key");
  button.hidden = !caller.keys;
  button.textContent = caller.tenant ? `Key of ${plain(caller.tenant).slice(0, 24)}` : "Key";
  // Who sees no fleet begins with its tasks.
  if (!ctx.may("metrics") && ["", "#", "#/"].includes(location.hash)) history.replaceState(null, "", "#/tasks");
  navigate();
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  const words = { auto: "as the system has them", light: "light", dark: "dark" };
  $("theme").textContent = `◐ ${next[0].toUpperCase()}${next.slice(1)}`;
  $("theme").setAttribute("aria-label", `Colours: ${words[next]}`);
  try {
    localStorage.setItem("penstock-theme", next);
  } catch {} // a browser that keeps nothing
}

let prefix = false;
function shortcut(event) {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.nodeName);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || $("ask").open) return;
  if (prefix) {
    const page = PAGES.find(([, , , letter]) => letter === event.key);
    prefix = false;
    if (page && ctx.may(page[2])) location.hash = `#/${page[0]}`;
  } else if (event.key === "g") {
    prefix = true;
    setTimeout(() => (prefix = false), 1500);
  } else if (event.key === "/") {
    event.preventDefault();
    $("find-id").focus();
  }
}

let kept = "auto";
try {
  kept = localStorage.getItem("penstock-theme") ?? "auto";
} catch {}
theme(THEMES.includes(kept) ? kept : "auto");
$("theme").onclick = () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]);
$("key").onclick = () => askKey();
$("find").onsubmit = (event) => {
  event.preventDefault();
  const id = $("find-id").value.trim();
  if (id) location.hash = `#/tasks/${encodeURIComponent(id)}`;
};
window.addEventListener("hashchange", () => {
  const { parts, query } = readHash();
  if (location.hash === "#main") return history.back();
  if (current && chosen(parts)?.[1] === current.page && current.rest.join("/") === parts.slice(1).join("/") && !current.page.mount) {
    current.query = query;
    refresh(true);
  } else navigate();
});
document.querySelector(".skip").onclick = (event) => (event.preventDefault(), main.focus());
document.addEventListener("keydown", shortcut);
document.addEventListener("visibilitychange", () => (document.hidden ? hide() : (refresh(), follow())));
setInterval(() => {
  fresh();
  if (current?.failedAt) show();
}, 1000);
begin();
