// Who used how much: tokens, engine time and money, by tenant, key, model or tier.

import { bar } from "./charts.js";
import { h, name } from "./dom.js";
import { amount, count, percent, plural, seconds } from "./format.js";
import { card, figure, heading, table, tabs } from "./parts.js";

const BY = [["tenant", "By tenant"], ["key", "By key"], ["model", "By model"], ["tier", "By tier"], ["day", "By day"]];
const SPANS = [["24h", "24 hours"], ["7d", "7 days"], ["30d", "30 days"]];
const HOURS = { "24h": 24, "7d": 168, "30d": 720 };

export const usage = {
  title: "Usage",
  every: 30000,
  load({ api, query }, signal) {
    const hours = HOURS[query.get("span")] ?? 24;
    const since = new Date(Date.now() - hours * 3600000).toISOString().slice(0, 13) + ":00";
    return api.get("v1/usage", { by: query.get("by") || "tenant", since }, signal);
  },
  draw(report, { query }) {
    const by = query.get("by") || "tenant";
    const rows = report.data.map((row) => ({ ...row, tokens: row.prompt_tokens + row.output_tokens }));
    if (by !== "day") rows.sort((a, b) => b.engine_seconds - a.engine_seconds || b.tokens - a.tokens);
    const sum = (field) => rows.reduce((all, row) => all + (Number(row[field]) || 0), 0);
    const whole = sum("engine_seconds") || 1;
    const currency = rows.find((row) => row.currency)?.currency;
    const overhead = rows.some((row) => row.idle_seconds !== undefined); // shown to who sees all tenants
    const devices = rows.some((row) => row.device_cost !== undefined);
    const energy = rows.some((row) => row.joules !== undefined);
    const money = (value) => (value === undefined ? "–" : `${amount(Number(value))} ${currency}`);
    return [
      heading("Usage"),
      h("div", { "data-key": "by" }, tabs("#/usage", query, "by", BY, by, "Group"), tabs("#/usage", query, "span", SPANS, query.get("span") || "24h", "Time")),
      h("div", { class: "figures", "data-key": "figures" }, figure(count(sum("tasks")), null, "tasks"), figure(count(sum("prompt_tokens")), null, "prompt tokens"), figure(count(sum("cached_tokens")), null, "of them cached"), figure(count(sum("output_tokens")), null, "output tokens"), figure(seconds(sum("engine_seconds")), null, "of engines"), overhead ? figure(seconds(sum("idle_seconds") + sum("starting_seconds")), null, "of workers idle or starting") : null, currency ? figure(amount(sum("cost")), currency, "cost") : null),
      h("div", { class: "cards", "data-key": "cards" }, card(null, { key: "list" }, table(
        [by[0].toUpperCase() + by.slice(1), ["Share of the engines", "grow"], ["Share", "num"], ["Tasks", "num"], ["Failed", "num"], ["Prompt tokens", "num"], ["Cached", "num"], ["Output tokens", "num"], ["Engine time", "num"], ...(overhead ? [["Idle", "num"], ["Starting", "num"]] : []), ...(energy ? [["Energy", "num"]] : []), ...(devices ? [["Device", "num"], ["Overhead", "num"]] : []), ...(currency ? [["Cost", "num"]] : [])],
        rows.map((row) => ({ key: `r${row[by]}`, cells: [row[by] === "" ? h("span", { class: "dim" }, `no ${by}`) : name(row[by], { most: 40 }), bar(row.engine_seconds / whole, { label: percent(row.engine_seconds / whole) }), percent(row.engine_seconds / whole), count(row.tasks), count(row.failed), count(row.prompt_tokens), count(row.cached_tokens), count(row.output_tokens), seconds(row.engine_seconds), ...(overhead ? [seconds(row.idle_seconds), seconds(row.starting_seconds)] : []), ...(energy ? [`${amount(row.joules + row.overhead_joules)} J`] : []), ...(devices ? [money(row.device_cost), money(row.overhead_cost)] : []), ...(currency ? [money(row.cost)] : [])] })),
        { label: "Usage", none: "Nothing was used in this time." }), currency ? null : h("p", { class: "dim empty" }, "No prices are set: penstock gateway --prices FILE shows what it costs."))),
    ];
  },
};
