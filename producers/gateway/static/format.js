// Numbers as people read them, always with their unit.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const date = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "long" });
const is = (value) => typeof value === "number" && Number.isFinite(value);
export const NONE = "–";

// 1,234 · 56.7 k · 8.90 M
export function count(value) {
  if (!is(value)) return NONE;
  if (Math.abs(value) < 100000) return whole.format(value);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)}\u202f${unit}`;
  return whole.format(value);
}

// 0.4 · 12 · 1,240: a rate needs no more digits
export function amount(value) {
  if (!is(value)) return NONE;
  if (value === 0) return "0";
  return Math.abs(value) < 10 ? String(Number(value.toPrecision(2))) : count(value);
}

// 0 s · 340 ms · 4.2 s · 3 min 12 s · 2 h 5 min · 3 d 4 h
export function seconds(value) {
  if (!is(value)) return NONE;
  const s = Math.max(0, value);
  if (s === 0) return "0\u202fs";
  if (s < 0.0995) return `${(s * 1000).toPrecision(2)}\u202fms`;
  if (s < 0.9995) return `${Math.round(s * 1000)}\u202fms`;
  if (s < 10) return `${s.toFixed(1)}\u202fs`;
  if (s < 59.5) return `${Math.round(s)}\u202fs`;
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  let rest = Math.round(s);
  const at = parts.findIndex(([size]) => rest >= size);
  const first = Math.floor(rest / parts[at][0]);
  rest -= first * parts[at][0];
  const next = at + 1 < parts.length ? Math.floor(rest / parts[at + 1][0]) : 0;
  return `${first}\u202f${parts[at][1]}${next ? ` ${next}\u202f${parts[at + 1][1]}` : ""}`;
}

export function bytes(value) {
  if (!is(value)) return NONE;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return `${(value / size).toPrecision(3)}\u202f${unit}`;
  return `${whole.format(value)}\u202fB`;
}

export const percent = (value) => {
  if (!is(value)) return NONE;
  if (value > 0 && value < 0.01) return "<1\u202f%";
  return `${Math.round(value * 100)}\u202f%`;
};

export const plural = (value, singular, many = `${singular}s`) => `${count(value)} ${value === 1 ? singular : many}`;

// Times are the store's (unix seconds), shown in the reader's zone.
export const time = (at) => (is(at) && at > 0 ? clock.format(at * 1000) : NONE);
export const when = (at, now) => {
  if (!is(at) || at <= 0) return NONE;
  return is(now) && Math.abs(now - at) < 43200 ? clock.format(at * 1000) : date.format(at * 1000);
};
export const exactly = (at) => (is(at) && at > 0 ? full.format(at * 1000) : "");
export const ago = (at, now) => (is(at) && is(now) && at > 0 ? `${seconds(Math.max(0, now - at))} ago` : NONE);
