// One screen: what waits, runs, fails and costs, and whether anything needs somebody.

import { bar, chart, spark } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { amount, bytes, count, NONE, percent, plural, seconds } from "./format.js";
import { every, follow, latest } from "./live.js";
import { card, copyable, empty, heading, link, modelName, moment, state, table, taskLink, TIERS } from "./parts.js";

// Least time between two reports of usage, and between two looks for failed tasks: both read many rows of the store, so
// they are asked for only if the counts of ended tasks say that there is something new.
const USAGE_MS = 60000;
const FAILED_MS = 10000;
const WORKERS = 60;
// Where a finding's particulars are.
const PLACES = {
  "dead letters": ["#/dead-letters", "Dead letters"], unserved: ["#/queues", "Queues"], workers: ["#/workers", "Workers"],
  autoscaler: ["#/scaling", "Scaling"], overload: ["#/queues", "Queues"], "long waits": ["#/queues", "Queues"], "worker clocks": ["#/workers", "Workers"],
  "webhook deliveries": ["#/webhooks?state=dead", "Webhooks"], "webhook endpoints": ["#/webhooks", "Webhooks"],
};
const SPAN_S = 900; // of the charts
let past = null; // the series as it was shown last

// A gateway has its own series, and begins anew with itself: what is shown goes on where another one, or the same after
// its restart, knows less.
function continued(series) {
  const [first, last] = [series.at[0], series.at.at(-1)];
  if (past && first !== undefined) {
    const from = past.at.findIndex((at) => at > last - SPAN_S);
    const to = past.at.findIndex((at) => at >= first);
    const kept = from < 0 ? [0, 0] : [from, to < 0 ? past.at.length : to];
    for (const name of Object.keys(series)) series[name] = [...(past[name] ?? []).slice(...kept), ...series[name]];
  }
  past = series;
}

let shown = null; // the overview that was drawn last
const none = { at: 0, mark: null, value: null };
let kept = { usage: none, failed: none };
let keptFor = null; // the caller: another one may not see it

// What was asked for before, or anew: if its mark has changed, and some time has passed. What is refused stays as it was.
async function renewed(field, mark, ms, ask) {
  const { at, mark: before, value } = kept[field];
  if (mark === before || Date.now() - at < ms) return value;
  const next = await ask().catch((error) => {
    if (error.status === 429 || error.status === 503) return value;
    throw error;
  });
  kept[field] = { at: Date.now(), mark, value: next };
  return next;
}

export const overview = {
  title: "Overview",
  every,
  follow,
  async load({ api, caller, may, clock }, signal) {
    if (caller !== keptFor) [kept, keptFor] = [{ usage: none, failed: none }, caller];
    const since = new Date(Date.now() - 86400000).toISOString().slice(0, 13) + ":00";
    const { now, fleet } = await latest(api, signal);
    clock(now.at);
    if (now !== shown) continued(now.series);
    shown = now;
    if (!may("read")) return { now, fleet, usage: null, failed: null };
    const { tasks } = now.totals;
    const ended = Object.values(tasks).reduce((sum, count) => sum + count, 0);
    const [usage, failed] = await Promise.all([
      renewed("usage", ended, USAGE_MS, () => api.optional("v1/usage", { by: "tenant", since }, signal)),
      renewed("failed", tasks.failed, FAILED_MS, () => api.optional("v1/tasks", { kind: "all", status: "failed", limit: 5 }, signal)),
    ]);
    return { now, fleet, usage, failed };
  },

  draw({ now, fleet, usage, failed }, ctx) {
    const { totals, series } = now;
    const idle = !Object.values(totals.tasks).some(Boolean) && !totals.waiting && !totals.running;
    return [
      heading("Overview"),
      findings(now.findings),
      idle ? first(now, ctx) : null,
      tiles(totals, series, usage),
      h(
        "div",
        { class: "cards stretch", "data-key": "cards" },
        card(null, { class: "two-thirds", key: "load" }, chart({
          label: "Tasks that wait, and sequences that run", at: series.at, format: count, height: 170,
          series: [
            { name: "waiting", values: series.waiting, tone: "wait" },
            { name: "running", values: series.running, tone: "run" },
          ],
        })),
        card("Longest waits", { class: "third" }, waits(fleet)),
        card(null, { class: "half wall-third", key: "tokens" }, chart({
          label: "Tokens made", at: series.at, format: (value) => `${amount(value)}\u202f/s`, height: 110,
          series: [{ name: "all models", values: series.tokens_per_s, tone: "run" }],
        })),
        card(null, { class: "half wall-third", key: "first" }, chart({
          label: "Time to the first token, p95 of a minute", at: series.at, format: seconds, height: 110,
          series: [
            { name: "first token", values: series.first_token_p95_s, tone: "run" },
            { name: "waiting, p95", values: series.queue_wait_p95_s, tone: "wait", fill: false },
          ],
        })),
        card("Models", { class: "two-thirds wall-third" }, modelRows(now.models)),
        card("Who used it, last 24 h", { class: "third" }, users(usage)),
        card("Workers", { class: "two-thirds wall-third" }, workerMap(fleet)),
        card("Failed last", { class: "third" }, failures(failed, ctx), servers(now.servers)),
      ),
    ];
  },
};

function findings(list) {
  if (!list.length) return h("p", { class: "note ok", "data-key": "findings" }, h("b", null, "Nothing needs you."), " Every check passes: workers, queues, sweeper, dead letters, webhooks, memory.");
  return h("ul", { class: "findings", "data-key": "findings", "aria-label": "What needs somebody" }, list.map((finding) => {
    const place = PLACES[finding.check];
    return h("li", { class: `note ${finding.status === "fail" ? "bad" : "warn"}` },
      h("b", null, finding.status === "fail" ? "Broken: " : "Look at: ", plain(finding.check)), plain(finding.detail),
      h("span", { class: "dim" }, finding.advice ? `${sentence(finding.advice)} ` : "", place ? link(...place) : null));
  }));
}

const sentence = (text) => `${plain(text[0].toUpperCase() + text.slice(1))}.`;

function tiles(totals, series, usage) {
  const last = (values) => values.at(-1) ?? null;
  const day = usage?.data.reduce((sum, row) => sum + (Number(row.cost) || 0), 0);
  const currency = usage?.data.find((row) => row.currency)?.currency;
  const tokens = usage?.data.reduce((sum, row) => sum + row.prompt_tokens + row.output_tokens, 0);
  const ended = last(series.ended_per_s);
  const failing = last(series.failed_per_s);
  const tile = (title, value, unit, more, at, values, tone) =>
    h("section", { class: "tile", "data-key": title }, h("h2", null, title), h("b", null, value, unit && value !== NONE ? h("small", null, `\u202f${unit}`) : null), h("p", null, more),
      at ? spark(at, values, { tone, label: `${title}, its course` }) : null);
  return h("div", { class: "tiles", "data-key": "tiles" },
    tile("Waiting", count(totals.waiting), totals.waiting === 1 ? "task" : "tasks", totals.oldest_s === null ? "nothing waits" : `the oldest for ${seconds(totals.oldest_s)}`, series.at, series.waiting, "wait"),
    tile("Running", count(totals.running), `of ${count(totals.capacity)}`, `${plural(totals.workers, "worker")}, ${count(totals.ready)} ready`, series.at, series.running, "run"),
    tile("Tokens", amount(last(series.tokens_per_s)), "/s", `of ${plural(totals.running, "sequence")} at once`, series.at, series.tokens_per_s, "run"),
    tile("First token, p95", seconds(last(series.first_token_p95_s)), null, last(series.queue_wait_p95_s) === null ? "none in the last minute" : `waiting p95: ${seconds(last(series.queue_wait_p95_s))}`, series.at, series.first_token_p95_s, "run"),
    tile("Failing", ended === null ? NONE : amount(failing), "/s", ended === null ? "not measured yet" : `${amount(ended)} /s end in all`, series.at, series.failed_per_s, "bad"),
    currency
      ? tile("Cost, last 24 h", amount(day), currency, `${count(tokens)} tokens`)
      : tile("Used, last 24 h", count(tokens), "tokens", usage ? `${plural(usage.data.reduce((sum, row) => sum + row.tasks, 0), "task")}; no prices` : "this key sees no usage"),
  );
}

function waits(fleet) {
  const rows = fleet.queues.flatMap((queue) => TIERS.filter((tier) => queue.tiers[tier]?.queued).map((tier) => ({ queue, tier, ...queue.tiers[tier] })));
  if (!rows.length) return empty("No task waits for a worker.");
  rows.sort((a, b) => (b.oldest_s ?? 0) - (a.oldest_s ?? 0));
  const top = Math.max(...rows.map((row) => row.queued));
  return h("ul", { class: "rows" }, rows.slice(0, 7).map(({ queue, tier, queued, oldest_s }) =>
    h("li", { "data-key": `${queue.name} ${tier}` }, h("span", null, modelName(queue.model), h("span", { class: "dim" }, ` ${tier}`)), bar(queued / top, { tone: "wait", label: plural(queued, "task") }), h("span", null, `${count(queued)} · ${seconds(oldest_s)}`))));
}

function modelRows(models) {
  return table(["Model", ["Waiting", "num"], ["Running", "num"], ["Tokens/s", "num"], ["First token p50", "num"], ["p95", "num"], ["Failing/s", "num"], "Load"],
    models.map((model) => ({ key: model.name, cells: [link(`#/models?model=${encodeURIComponent(model.name)}`, modelName(model.name)), count(model.waiting), count(model.running), amount(model.tokens_per_s), seconds(model.first_token.p50), seconds(model.first_token.p95), amount(model.failed_per_s), state(model.overload)] })),
    { label: "Models", none: "No model is published: start a worker, or penstock models publish." });
}

function users(usage) {
  if (!usage) return empty("This key may not read usage.");
  const rows = usage.data.map((row) => ({ tenant: row.tenant, tokens: row.prompt_tokens + row.output_tokens, tasks: row.tasks, cost: row.cost && `${amount(Number(row.cost))} ${row.currency}` }));
  if (!rows.length) return empty("Nothing was used.");
  rows.sort((a, b) => b.tokens - a.tokens);
  const all = rows.reduce((sum, row) => sum + row.tokens, 0) || 1;
  return [h("ul", { class: "rows" }, rows.slice(0, 6).map((row) => h("li", { "data-key": `t${row.tenant}` }, row.tenant ? name(row.tenant, { most: 24 }) : h("span", { class: "dim" }, "no tenant"), bar(row.tokens / all, { label: percent(row.tokens / all) }), h("span", null, row.cost ?? `${count(row.tokens)} tokens`)))),
    h("p", { class: "dim empty" }, link("#/usage", "By key, model and tier"))];
}

function workerMap(fleet) {
  if (!fleet.workers.length) return empty("No worker is up. Tasks wait until one is: ", h("code", null, "penstock worker --model MODEL"), ".");
  return [h("ul", { class: "fleet" }, fleet.workers.slice(0, WORKERS).map((worker) =>
    h("li", { "data-key": worker.id }, h("span", { title: plain(worker.name) }, h("bdi", { dir: "ltr" }, plain(worker.name))), bar(worker.kv_used_ratio, { tone: worker.state === "ready" ? "run" : "warn", label: `KV cache ${percent(worker.kv_used_ratio)} full` }),
      h("span", { class: "pair" }, h("span", null, `${count(worker.running)} of ${count(worker.capacity)}`), worker.state === "ready" ? h("span", null, worker.kv_blocks_total === 0 ? "no KV" : `KV ${percent(worker.kv_used_ratio)}`) : state(worker.state))))),
  fleet.workers.length > WORKERS ? h("p", { class: "dim empty" }, `${WORKERS} of ${count(fleet.totals.workers)}: `, link("#/workers", "all")) : null];
}

function failures(failed, ctx) {
  if (!failed) return empty("This key may not read tasks.");
  if (!failed.data.length) return empty("None of the latest tasks failed.");
  return h("ul", { class: "rows texts" }, failed.data.map((task) => h("li", { "data-key": task.id }, taskLink(task.id), name(task.error?.message ?? task.error?.code ?? "", { most: 50 }), moment(task.finished_at ?? task.created_at, ctx.now()))));
}

function servers(list) {
  return [h("h3", null, "Memory"), h("ul", { class: "rows" }, list.map((server) => h("li", { "data-key": server.name }, h("span", null, plain(server.name)), server.limit_bytes ? bar(server.used_ratio, { tone: server.used_ratio > 0.9 ? "bad" : "run", label: percent(server.used_ratio) }) : h("span", { class: "dim" }, "no bound"), h("span", null, bytes(server.used_bytes)))))];
}

function first(now, ctx) {
  const model = now.models[0]?.name ?? "MODEL";
  const text = `curl ${ctx.api.url("v1/tasks")} -H 'Content-Type: application/json'${ctx.caller.keys ? " \\\n  -H \"Authorization: Bearer $PENSTOCK_API_KEY\"" : ""} \\\n  -d '${JSON.stringify({ model, prompt: "Once upon a time", max_tokens: 60 }).replaceAll("'", "'\\''")}'`;
  return card("Submit the first task", { key: "first-task" },
    h("p", null, now.models.length ? "Nothing has run here yet. Send a task from a shell, or " : "No model is served yet: start one with penstock worker --model smollm2. Then send a task, or ", link("#/playground", "try the playground"), "; this page follows."),
    copyable(text));
}
