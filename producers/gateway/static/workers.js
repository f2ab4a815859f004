// Workers: what each runs, on what, how full it is, and why one takes nothing.

import { bar } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { ago, count, percent, plural, seconds } from "./format.js";
import { button, card, figure, heading, modelName, state, table, tabs } from "./parts.js";

export const workers = {
  title: "Workers",
  every: 2000,
  async load({ api, clock }, signal) {
    const fleet = await api.get("v1/fleet", { max_age: 2 }, signal);
    clock(fleet.at);
    return fleet;
  },
  draw(fleet, ctx) {
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
            name(worker.name, { most: 32 }),
            h("span", null, state(worker.state), worker.unready.length ? h("span", { class: "dim" }, " ", worker.unready.map(plain).join("; ").slice(0, 120)) : null),
            h("span", null, modelName(worker.model), h("span", { class: "dim" }, ` ${plain(worker.version ?? "").slice(0, 10)}`)),
            pair(bar(worker.capacity ? worker.running / worker.capacity : 0, { label: `${worker.running} of ${worker.capacity} sequences` }), `${count(worker.running)} of ${count(worker.capacity)}`),
            pair(bar(worker.kv_used_ratio, { tone: worker.kv_used_ratio > 0.9 ? "warn" : "run", label: `KV cache ${percent(worker.kv_used_ratio)} full` }), percent(worker.kv_used_ratio)),
            count(worker.generated_tokens), name(worker.device, { most: 20 }), name(worker.release, { most: 14 }),
            worker.since === null ? "–" : ago(worker.since, fleet.at).replace(" ago", ""), worker.lease_s === null ? "–" : seconds(worker.lease_s), drain(worker, ctx)] })),
          { label: "Workers", none: "No worker is up. Start one: penstock worker --model MODEL." }),
        fleet.totals.workers > fleet.workers.length ? h("p", { class: "dim" }, `${count(fleet.workers.length)} of ${plural(fleet.totals.workers, "worker")}.`) : null)),
    ];
  },
};

function drain(worker, ctx) {
  if (!ctx.may("admin") || worker.state === "draining") return null;
  return button("Drain", () => ctx.confirm({
    title: "Drain this worker?", verb: "Drain it", danger: true,
    text: [`${plain(worker.name)} takes no more tasks, ends the ${count(worker.running ?? 0)} that it runs, and exits. What it cannot end in its drain time goes back to the queue with its tokens.`, "Whether another worker takes its place is up to what started it: penstock up leaves it stopped."],
    run: async () => (await ctx.api.act(`v1/workers/${worker.id.split("/").map(encodeURIComponent).join("/")}/drain`), "It drains."),
  }), "quiet");
}

const pair = (picture, text) => h("span", { class: "pairing" }, picture, h("span", null, text));
