// Pictures of numbers, as SVG. Each has a sentence for those who do not see it.

import { h, s } from "./dom.js";
import { count, seconds } from "./format.js";

const WIDTH = 600;

// Runs of neighbouring values as path data; null is a gap.
function lines(values, x, y) {
  const runs = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null || value === undefined) run = null;
    else {
      if (!run) runs.push((run = []));
      run.push([x(i), y(value)]);
    }
  });
  return runs;
}
const path = (run) => run.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
const area = (run, floor) => `${path(run)}L${run.at(-1)[0].toFixed(1)} ${floor}L${run[0][0].toFixed(1)} ${floor}Z`;

function shape(series, at, top, height) {
  const first = at[0] ?? 0;
  const span = Math.max((at.at(-1) ?? 0) - first, 1e-9);
  const x = (i) => ((at[i] - first) / span) * WIDTH;
  const y = (value) => height - 1.5 - (Math.min(value, top) / top) * (height - 3);
  return series.flatMap(({ values, tone, fill = true }) =>
    lines(values, x, y).flatMap((run) => [
      fill && run.length > 1 && s("path", { d: area(run, height), class: `fill ${tone}` }),
      run.length > 1 && s("path", { d: path(run), class: `line ${tone}`, "vector-effect": "non-scaling-stroke" }),
    ]),
  ).filter(Boolean);
}

// A trend without axes.
export function spark(at, values, { tone = "accent", label, height = 34 }) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const top = Math.max(...known, 1e-9);
  return s(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    known.some(Boolean) ? shape([{ values, tone }], at, top, height) : s("path", { d: `M0 ${height - 2}H${WIDTH}`, class: "line none", "vector-effect": "non-scaling-stroke" }),
  );
}

// Times (s) of which the half has one unit, too.
const TIMES = [60, 120, 240, 600, 1200, 3600, 7200, 21600, 43200, 86400, 172800, 604800];

// A round number not below the largest value.
function ceiling(values, format) {
  const top = Math.max(...values.filter((value) => value !== null && value !== undefined), 0);
  if (top <= 0) return format === count ? 2 : 1;
  if (format === seconds && top > 40) return TIMES.find((step) => step >= top) ?? top;
  const size = 10 ** Math.floor(Math.log10(top));
  const steps = format === count && size === 1 ? [2, 4, 6, 8, 10] : format === count && size === 10 ? [1, 2, 3, 4, 6, 8, 10] : [1, 1.5, 2, 3, 4, 5, 6, 8, 10];
  return steps.map((step) => step * size).find((step) => step >= top * 0.999) ?? 10 * size;
}

// Series over one time axis. series: [{name, values, tone, fill, now}]; `format` gives numbers their unit.
// `since`, `until`: what its ends are called.
export function chart({ at, series, format, label, height = 150, since = null, until = "now" }) {
  const top = ceiling(series.flatMap(({ values }) => values), format);
  const span = at.length > 1 ? at.at(-1) - at[0] : 0;
  const summary = `${label}. ${series.map(({ name, values }) => `${name} ${until === "now" ? "now" : "at the end"} ${format(values.at(-1) ?? null)}`).join(", ")}.`;
  return h(
    "figure",
    { class: "chart" },
    h(
      "figcaption",
      null,
      h("h2", null, label),
      h("ul", { class: "legend" }, series.map(({ name, tone, values }) => h("li", null, h("i", { class: `swatch ${tone}` }), `${name} `, h("b", null, format(values.at(-1) ?? null))))),
    ),
    h(
      "div",
      { class: "plot" },
      h("span", { class: "tick top" }, format(top)),
      h("span", { class: "tick mid" }, format(top / 2)),
      h("span", { class: "tick low" }, format(0)),
      s(
        "svg",
        { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": summary, style: { height: `${height}px` } },
        [0.25, 0.5, 0.75, 1].map((part) => s("path", { d: `M0 ${(1 - part) * (height - 3) + 1.5}H${WIDTH}`, class: "grid", "vector-effect": "non-scaling-stroke" })),
        at.length ? shape(series, at, top, height) : null,
      ),
      h("span", { class: "axis" }, h("span", null, since ?? (span ? `${seconds(span)} ago` : "")), h("span", null, until)),
    ),
  );
}

// A share of a whole, from 0 to 1.
export function bar(share, { tone = "accent", label }) {
  const width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return h("span", { class: "bar", role: "img", "aria-label": label }, h("span", { class: tone, style: { width } }));
}

// Parts of one length: [{size, tone, label}].
export function parts(pieces, label) {
  const all = pieces.reduce((sum, { size }) => sum + size, 0) || 1;
  return h(
    "span",
    { class: "bar parts", role: "img", "aria-label": label },
    pieces.filter(({ size }) => size > 0).map(({ size, tone, label: title }) => h("span", { class: tone, title, style: { width: `${(size / all) * 100}%` } })),
  );
}

const COLUMNS = 48, ROWS = 6;

// Parts of a whole as a map of small squares, row by row: [{size, tone, label}].
export function cells(pieces, whole, label) {
  const all = Math.min(COLUMNS * ROWS, Math.max(whole, 1));
  let from = 0;
  const groups = pieces.map(({ size, tone, label: title }) => {
    const first = Math.round((from / whole) * all);
    from += size;
    const last = Math.min(all, Math.round((from / whole) * all));
    if (last <= first) return null;
    return s("g", { class: tone }, s("title", null, title), Array.from({ length: last - first }, (_, i) => s("rect", { x: ((first + i) % COLUMNS) * 10, y: Math.floor((first + i) / COLUMNS) * 10, width: 8.6, height: 8.6, rx: 1.5 })));
  });
  return s("svg", { class: "cells", viewBox: `0 0 ${COLUMNS * 10} ${Math.ceil(all / COLUMNS) * 10}`, role: "img", "aria-label": label }, groups);
}

// A difference from -1 to 1: its mean within its bounds, beside nothing and what is allowed.
export function between({ lower, mean, upper, margin }, { label }) {
  const x = (value) => (Math.max(-1, Math.min(1, value)) + 1) * 50;
  return s(
    "svg",
    { class: "between", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
    s("rect", { x: x(lower), y: 3, width: Math.max(x(upper) - x(lower), 0.5), height: 4, class: lower > margin ? "bad" : "band" }),
    s("path", { d: "M50 0V10", class: "grid", "vector-effect": "non-scaling-stroke" }),
    s("path", { d: `M${x(margin)} 0V10`, class: "line dim", "vector-effect": "non-scaling-stroke" }),
    s("rect", { x: x(mean) - 0.75, y: 1, width: 1.5, height: 8, class: lower > margin ? "bad" : "mean" }),
  );
}
