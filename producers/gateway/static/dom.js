// Elements from text and attributes alone. Nothing here, or anywhere in the console, parses markup: what others wrote
// (names, prompts, outputs, reasons) becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "open", "indeterminate"]);

// Children: nodes, texts, numbers, lists of these; null and false are left out.
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    // What a handler returns is nobody's business: false would keep the key that was pressed from the field.
    if (name === "on") for (const [event, act] of Object.entries(value)) element[`on${event}`] = (happened) => void act(happened);
    else if (name === "style") for (const [key, at] of Object.entries(value)) element.style.setProperty(key, at);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child);
  }
}

// Control characters and marks that turn the direction of a line, as what they are: U+202E.
const MARKS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
export const plain = (text) =>
  String(text).replace(MARKS, (mark) => `⟨U+${mark.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// A name that others made: on its own side of the line, whole in its title.
export function name(text, { most = 60 } = {}) {
  if (text === null || text === undefined || text === "") return h("span", { class: "dim" }, "–");
  const shown = plain(text);
  const cut = shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
  return h("bdi", cut === shown ? null : { title: shown.slice(0, 2000) }, cut);
}

// ---- changing what is shown without losing focus, selection or scroll ----

const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown", "ontoggle"];
const keyOf = (node) => (node.nodeType === 1 ? node.getAttribute("data-key") : null);
const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

// Make `parent` have these children, keeping those that are alike. Elements with data-own look after themselves.
export function patch(parent, nodes) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (keyOf(child) !== null) keyed.set(keyOf(child), child);
  let at = parent.firstChild;
  for (const node of [...nodes]) {
    const key = keyOf(node);
    const match = key === null ? at : keyed.get(key);
    if (match && alike(match, node)) {
      if (match === at) at = at.nextSibling;
      else parent.insertBefore(match, at);
      if (match !== node) update(match, node);
    } else {
      parent.insertBefore(node, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function update(old, fresh) {
  if (old.nodeType !== 1) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.hasAttribute("data-own")) return;
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.style && old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  for (const handler of HANDLERS) old[handler] = fresh[handler];
  if (old.nodeName === "INPUT" || old.nodeName === "SELECT" || old.nodeName === "TEXTAREA") {
    if (old.disabled !== fresh.disabled) old.disabled = fresh.disabled;
    if (old.nodeName !== "SELECT") return; // what is typed is the reader's
  }
  if (old.nodeName === "BUTTON" && old.disabled !== fresh.disabled) old.disabled = fresh.disabled;
  patch(old, fresh.childNodes);
}
