// What waits, where, for how long, and what keeps it.

import { parts } from "./charts.js";
import { h, plain } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";
import { every, follow, latest } from "./live.js";
import { card, heading, link, modelName, state, table, TIERS } from "./parts.js";

export const queues = {
  title: "Queues",
  every,
  follow,
  async load({ api, clock }, signal) {
    const { now, fleet } = await latest(api, signal);
    clock(fleet.at);
    return { fleet, now };
  },
  draw({ fleet, now }) {
    const busy = fleet.queues.filter((queue) => queue.queued || queue.delayed || queue.in_flight);
    const idle = fleet.queues.filter((queue) => !busy.includes(queue));
    const sum = (tier) => fleet.queues.reduce((all, queue) => all + (queue.tiers[tier]?.queued ?? 0), 0);
    const oldest = (tier) => Math.max(-1, ...fleet.queues.map((queue) => queue.tiers[tier]?.oldest_s ?? -1));
    const all = Math.max(1, fleet.totals.queued);
    return [
      heading("Queues"),
      h("div", { class: "cards", "data-key": "cards" },
        card("By tier", { key: "tiers" }, table(["Tier", ["Waiting", "num"], ["Oldest", "num"], ["Share", "grow"]], TIERS.map((tier) => ({ key: tier, cells: [tier, count(sum(tier)), oldest(tier) < 0 ? "–" : seconds(oldest(tier)), parts([{ size: sum(tier), tone: tier, label: tier }, { size: all - sum(tier), tone: "none" }], percent(sum(tier) / all))] })), { label: "Tiers" })),
        card("Queues", { key: "queues" }, table(
          ["Queue", ...TIERS.map((tier) => [tier, "num"]), ["Oldest", "num"], ["Tenants", "num"], ["In flight", "num"], ["Later", "num"], "Overload", ""],
          busy.map((queue) => row(queue, now)), { label: "Queues", none: "No task waits, and none is in flight." }),
        idle.length ? h("p", { class: "dim empty" }, `${plural(idle.length, "queue")} with nothing in ${idle.length === 1 ? "it" : "them"}: `, idle.slice(0, 8).map((queue, i) => [i ? ", " : "", h("bdi", null, plain(queue.name))]), idle.length > 8 ? " and others" : "") : null),
        card("How to read this", { key: "help" }, h("p", { class: "dim" }, "Higher tiers go first; a tier rises by one for each 30 s in which nothing was taken from it. “In flight” is what workers have taken, “later” what is to be offered again. Why one task waits: open it, and read “Why”."), h("p", null, link("#/tasks?status=queued&kind=all", "Tasks that wait")))),
    ];
  },
};

function row(queue, now) {
  const ages = TIERS.filter((tier) => queue.tiers[tier]?.queued).map((tier) => queue.tiers[tier].oldest_s ?? 0);
  const tenants = Math.max(...TIERS.map((tier) => queue.tiers[tier]?.tenants ?? 0));
  const model = now.models.find((model) => model.name === queue.model && `${model.name}@${model.version}` === queue.name);
  return {
    key: queue.name,
    cells: [
      modelName(queue.name), ...TIERS.map((tier) => count(queue.tiers[tier]?.queued)), ages.length ? seconds(Math.max(...ages)) : "–", count(tenants), count(queue.in_flight), count(queue.delayed),
      model ? h("span", null, state(model.overload), model.pressure ? ` ${percent(model.pressure)} of the bound` : "") : "–",
      link(`#/tasks?status=queued&kind=all&model=${encodeURIComponent(queue.model)}`, "Tasks"),
    ],
  };
}
