// Workers: what each runs, on what, how full it is and with what, and why one takes nothing.

import { bar, cells, parts } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { ago, amount, count, percent, plural, seconds } from "./format.js";
import { every, follow, latest } from "./live.js";
import { button, card, empty, facts, figure, heading, link, modelName, pathOf, state, table, tabs, taskLink } from "./parts.js";

export const workers = {
  title: "Workers",
  every: (data) => (data?.one ? 2000 : every()),
  follow: async (ctx, signal) => ctx.rest[0] || follow(ctx, signal),
  async load({ api, clock, rest }, signal) {
    if (rest[0]) return { one: await api.get(`v1/workers/${pathOf(rest[0])}`, null, signal) };
    const { fleet } = await latest(api, signal);
    clock(fleet.at);
    return fleet;
  },
  draw(fleet, ctx) {
    if (fleet.one) return worker(fleet.one, ctx);
    const { query } = ctx;
    const models = [...new Set(fleet.workers.map((worker) => worker.model))];
    const chosen = query.get("model");
    const shown = fleet.workers.filter((worker) => !chosen || worker.model === chosen);
    const sum = (field) => shown.reduce((all, worker) => all + (worker[field] ?? 0), 0);
    const kv = shown.filter((worker) => worker.kv_used_ratio !== null);
    return [
      heading("Workers"),
      models.length > 1 ? h("div", { "data-key": "tabs" }, tabs("#/workers", query, "model", [["", "All models"], ...models.map((model) => [model, plain(model)])], chosen, "Models")) : null,
      h("div", { class: "figures", "data-key": "figures" },
        figure(count(shown.length), null, "workers"), figure(count(shown.filter((worker) => worker.state === "ready").length), null, "ready"),
        figure(count(sum("running")), `of ${count(sum("capacity"))}`, "sequences run"), figure(count(sum("waiting")), null, "taken, not begun"),
        figure(kv.length ? percent(kv.reduce((all, worker) => all + worker.kv_used_ratio, 0) / kv.length) : "–", null, "of the KV caches in use")),
      h("div", { class: "cards", "data-key": "cards" },
        card("All workers", { key: "workers" }, table(
          ["Worker", "State", "Model", ["Running", "grow"], ["KV cache", "grow"], ["Tokens made", "num"], "Device", "Release", ["Up", "num"], ["Lease", "num"], ["", "actions"]],
          shown.map((worker) => ({ key: worker.id, cells: [
            h("a", { href: `#/workers/${encodeURIComponent(worker.id)}` }, name(worker.name, { most: 32 })),
            h("span", null, state(worker.state), worker.unready.length ? h("span", { class: "dim" }, " ", worker.unready.map(plain).join("; ").slice(0, 120)) : null),
            h("span", null, modelName(worker.model), h("span", { class: "dim" }, ` ${plain(worker.version ?? "").slice(0, 10)}`)),
            pair(bar(worker.capacity ? worker.running / worker.capacity : 0, { label: `${worker.running} of ${worker.capacity} sequences` }), `${count(worker.running)} of ${count(worker.capacity)}`),
            worker.kv_blocks_total === 0 ? "–" : pair(cache(worker), percent(worker.kv_used_ratio)),
            generates(worker) ? count(worker.generated_tokens) : "–", h("span", null, name(worker.device, { most: 20 }), worker.ranks > 1 ? h("span", { class: "dim" }, ` ${plural(worker.ranks, "process", "processes")}`) : null), name(worker.release, { most: 14 }),
            worker.since === null ? "–" : ago(worker.since, fleet.at).replace(" ago", ""), worker.lease_s === null ? "–" : seconds(worker.lease_s), drain(worker, ctx)] })),
          { label: "Workers", none: "No worker is up. Start one: penstock worker --model MODEL." }),
        fleet.totals.workers > fleet.workers.length ? h("p", { class: "dim" }, `${count(fleet.workers.length)} of ${plural(fleet.totals.workers, "worker")}.`) : null)),
    ];
  },
};

// An encoder computes texts, and keeps none of them.
const generates = ({ kind }) => (kind ?? "generate") === "generate";
const MAKES = { generate: "text", embed: "vectors", rerank: "scores of texts for a query", classify: "labels of texts", token_classify: "labels of tokens" };

// Used, cached and free blocks as one bar; used alone, where a worker of an earlier release says no more.
function cache(worker) {
  const { kv_blocks_total: total, kv_blocks_used: used, kv_blocks_cached: cached } = worker;
  const tone = worker.kv_used_ratio > 0.9 ? "warn" : "run";
  if (!total || cached === null || cached === undefined) return bar(worker.kv_used_ratio, { tone, label: `KV cache ${percent(worker.kv_used_ratio)} full` });
  return parts([{ size: used, tone, label: "used" }, { size: cached, tone: "cached", label: "cached" }, { size: Math.max(0, total - used - cached), tone: "none", label: "free" }], `KV cache: ${percent(used / total)} used, ${percent(cached / total)} cached`);
}

function worker(one, ctx) {
  return [
    heading("Worker", name(one.name, { most: 40 }), state(one.state), link("#/workers", "All workers"), h("div", { class: "buttons" }, drain(one, ctx))),
    one.unready.length ? h("p", { class: "note bad", "data-key": "why" }, one.unready.map(plain).join("; ")) : null,
    one.slow_rank ? h("p", { class: "note warn", "data-key": "slow" }, plain(one.slow_rank)) : null,
    h("div", { class: "figures", "data-key": "figures" },
      figure(count(one.running), `of ${count(one.capacity)}`, generates(one) ? "sequences run" : "texts at once"), figure(count(one.waiting), null, "taken, not begun"),
      generates(one) ? [
        figure(percent(one.kv_used_ratio), null, "of the KV cache in use"), figure(count(one.generated_tokens), null, "tokens made"),
        figure(one.prompt_tokens ? percent(one.cached_tokens / one.prompt_tokens) : "–", null, "of prompt tokens from the cache"), figure(count(one.preemptions), null, "preemptions"),
      ] : figure(count(one.prompt_tokens), null, "tokens read")),
    h("div", { class: "cards", "data-key": "cards" },
      generates(one) ? card("KV cache", { class: "two-thirds", key: "kv" }, map(one)) : null,
      card("Facts", { class: generates(one) ? "third" : "", key: "facts" }, facts([
        ["Model", modelName(one.model)], ["Version", h("span", { class: "mono" }, plain(one.version ?? "–"))], one.kind && ["Makes", MAKES[one.kind] ?? plain(one.kind)], ["Device", name(one.device)],
        one.ranks > 1 && ["Computed by", `${count(one.ranks)} processes: ${[one.pipeline_parallel > 1 && plural(one.pipeline_parallel, "stage"), one.tensor_parallel > 1 && plural(one.tensor_parallel, "rank") + (one.pipeline_parallel > 1 ? " each" : "")].filter(Boolean).join(", ")}`],
        one.engine_process && ["Engine", "in a process of its own"], one.adapters?.length && ["Adapters loaded", one.adapters.map((version, i) => [i ? ", " : "", name(version, { most: 24 })])], one.share !== null && ["Share of the device", percent(one.share)],
        ["Release", name(one.release)], ["Up", one.since === null ? "–" : ago(one.since, ctx.now()).replace(" ago", "")], ["Lease", one.lease_s === null ? "–" : seconds(one.lease_s)],
        ["Incarnation", h("span", { class: "mono" }, name(one.id))], ...Object.entries(one.gpu).slice(0, 12).map(([label, value]) => [plain(label).replaceAll("_", " "), amount(value)]),
      ])),
      generates(one) ? card("Sequences that run", { key: "sequences" }, table(
        ["Task", "Choice", "Tier", ["Prompt tokens", "num"], ["Tokens so far", "num"], ["Blocks", "num"], ["Of the cache", "grow"]],
        one.sequences.map((row, i) => ({ key: row.task === null ? `s${i}` : `${row.task} ${row.choice} ${one.sequences.slice(0, i).filter(({ task, choice }) => task === row.task && choice === row.choice).length}`, cells: [row.task === null ? "another's" : taskLink(row.task), count(row.choice), row.tier, count(row.prompt_tokens), count(row.tokens), count(row.blocks), bar(one.kv_blocks_total ? row.blocks / one.kv_blocks_total : 0, { tone: row.tier, label: percent(row.blocks / one.kv_blocks_total) })] })),
        { label: "Sequences", none: one.running ? "This worker does not name them: it is of an earlier release." : "None runs." }),
      one.running > one.sequences.length && one.sequences.length ? h("p", { class: "dim" }, `The ${count(one.sequences.length)} largest of ${count(one.running)}.`) : null) : null),
  ];
}

// Blocks by who holds them. Sequences that share blocks hold fewer together than each of them for itself.
function map({ kv_blocks_total: total, kv_blocks_used: used, kv_blocks_cached: cached, sequences }) {
  if (!total) return empty("It has no KV cache.");
  const sum = sequences.reduce((all, { blocks }) => all + blocks, 0);
  const scale = sum > used ? used / sum : 1;
  const pieces = [
    ...sequences.map(({ tier, blocks, tokens }, i) => ({ size: blocks * scale, tone: `${tier}${i % 2 ? " odd" : ""}`, label: `${tier}, ${count(tokens)} tokens: ${plural(blocks, "block")}` })),
    { size: Math.max(0, used - sum), tone: "other", label: `other sequences: ${plural(Math.max(0, used - sum), "block")}` },
    { size: cached ?? 0, tone: "cached", label: `cached: ${plural(cached ?? 0, "block")}` },
    { size: Math.max(0, total - used - (cached ?? 0)), tone: "free", label: "free" },
  ];
  const free = Math.max(0, total - used - (cached ?? 0));
  const key = (tone, text, blocks) => h("li", null, h("i", { class: `swatch ${tone}` }), `${text} `, h("b", null, percent(blocks / total)), ` ${plural(blocks, "block")}`);
  const tiers = [...new Set(sequences.map(({ tier }) => tier))];
  return [
    cells(pieces, total, `KV cache of ${plural(total, "block")}: ${percent(used / total)} held by sequences, ${percent((cached ?? 0) / total)} cached, ${percent(free / total)} free`),
    h("ul", { class: "legend" }, tiers.map((tier) => key(tier, tier, sequences.reduce((all, row) => all + (row.tier === tier ? row.blocks * scale : 0), 0))), used > sum ? key("other", sequences.length ? "other sequences" : "sequences", used - sum) : null, cached === null || cached === undefined ? null : key("cached", "cached", cached), key("free", "free", free)),
    scale < 1 ? h("p", { class: "dim empty" }, "Sequences share blocks here: prompts that begin alike are kept once.") : null,
  ];
}

function drain(worker, ctx) {
  if (!ctx.may("admin") || worker.state === "draining") return null;
  return button("Drain", () => ctx.confirm({
    title: "Drain this worker?", verb: "Drain it", danger: true,
    text: [`${plain(worker.name)} takes no more tasks, ends the ${count(worker.running ?? 0)} that it runs, and exits. What it cannot end in its drain time goes back to the queue with its tokens.`, "Whether another worker takes its place is up to what started it: penstock up leaves it stopped."],
    run: async () => (await ctx.api.act(`v1/workers/${pathOf(worker.id)}/drain`), "It drains."),
  }), "quiet");
}

const pair = (picture, text) => h("span", { class: "pairing" }, picture, h("span", null, text));
