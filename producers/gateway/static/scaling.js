// How many workers each pool has, should have, and why: the autoscaler's decisions, and an operator's.

import { h, name, plain } from "./dom.js";
import { ago, amount, count, exactly, percent, seconds } from "./format.js";
import { button, card, field, heading, link, modelName, moment, note, pathOf, state, table } from "./parts.js";

export const scaling = {
  title: "Scaling",
  every: 5000,
  async load({ api, query, clock }, signal) {
    const [fleet, history] = await Promise.all([
      api.get("v1/fleet", { max_age: 2 }, signal),
      api.optional("v1/scaling/decisions", { pool: query.get("pool"), limit: 50 }, signal),
    ]);
    clock(fleet.at);
    return { fleet, history };
  },
  draw({ fleet, history }, ctx) {
    const scaled = fleet.pools.filter((pool) => pool.decision);
    const pool = ctx.query.get("pool");
    return [
      heading("Scaling", pool ? link("#/scaling", "All pools") : null),
      note(fleet.autoscaler ? "ok" : "info", fleet.autoscaler ? ["The autoscaler that leads: ", name(fleet.autoscaler)] : "No autoscaler leads: the number of workers is whatever was started. penstock up --min 0 --max 4, or penstock autoscaler, lets it follow the queue."),
      h("div", { class: "cards", "data-key": "cards" },
        card("Pools", { key: "pools" }, table(
          ["Pool", ["Up", "num"], ["Ready", "num"], ["Wanted", "num"], ["Ordered", "num"], "Decided", ["Why", "wide"], ["", "actions"]],
          scaled.map((row) => ({ key: row.name, cells: [link(`#/scaling?pool=${encodeURIComponent(row.name)}`, modelName(row.name)), count(row.workers), count(row.ready), row.desired === null ? "–" : count(row.desired), count(row.decision.ordered), h("span", { title: exactly(row.decision.at) }, ago(row.decision.at, fleet.at)), h("span", null, row.decision.pinned === null || row.decision.pinned === undefined ? null : [state("pinned"), " "], plain(row.decision.reason), pinnedUntil(row.decision, ctx), row.decision.trouble ? note("bad", plain(row.decision.trouble)) : null), h("span", { class: "buttons" }, retry(row, ctx), pin(row, ctx))] })),
          { label: "Pools", none: "No pool is scaled." })),
        history ? card(pool ? `Changes of ${plain(pool)}` : "Changes", { key: "changes" }, table(
          ["At", "Pool", ["Up", "num"], ["Wanted", "num"], ["Why", "wide"], "It saw"],
          history.data.map((row, i) => ({ key: `${row.at} ${row.pool} ${i}`, cells: [moment(row.at, ctx.now()), modelName(row.pool), count(row.before), count(row.desired), h("span", null, plain(row.reason), row.trouble ? h("span", { class: "dim" }, ` ${plain(row.trouble)}`) : null), signals(row.signals)] })),
          { label: "Decisions", none: "No decision changed anything yet." })) : note("warn", "This gateway is of an earlier release, and does not tell the history.")),
    ];
  },
};

function signals(seen) {
  const shown = Object.entries(seen).filter(([key, value]) => value && key !== "at").slice(0, 6);
  return shown.length ? h("span", { class: "dim" }, shown.map(([key, value], i) => [i ? ", " : "", `${plain(key).replaceAll("_", " ")} ${amount(value)}`])) : "–";
}

const pinnedUntil = ({ pinned_until: until }, ctx) => (until ? h("span", { class: "dim" }, ", until ", moment(until, ctx.now())) : null);

// Its number of workers, set by hand, and let go of.
function pin(row, ctx) {
  if (!ctx.may("admin")) return null;
  const path = `v1/scaling/${pathOf(row.name)}/pin`;
  const { pinned } = row.decision;
  const set = button("Pin", () => ctx.confirm({
    title: "Set this pool's number of workers?", verb: "Pin it", danger: true,
    text: [`The autoscaler gives ${plain(row.name)} this number, whatever waits, in place of the ${count(row.decision.desired)} that it wants now. Fewer drain: what they cannot end in their drain time goes back to the queue with its tokens. 0 stops the pool.`, "Once it is unpinned, or the time is over, the policy goes on from there."],
    fields: [
      field("Workers", (id) => h("input", { id, name: "workers", type: "number", min: "0", required: true, value: String(pinned ?? row.decision.desired ?? 1) })),
      field("For", (id) => h("select", { id, name: "for" }, [["3600", "1 hour"], ["14400", "4 hours"], ["86400", "1 day"], ["", "until it is unpinned"]].map(([value, text]) => h("option", { value }, text)))),
    ],
    run: async (form) => {
      const set = await ctx.api.post(path, { workers: Math.round(Number(form.get("workers"))), for_s: form.get("for") ? Number(form.get("for")) : null });
      return `It is pinned at ${set.workers}${set.current ? "" : ", for the next autoscaler that leads"}.`;
    },
  }), "quiet");
  if (pinned === null || pinned === undefined) return set;
  return [set, button("Unpin", () => ctx.confirm({
    title: "Let the policy decide again?", verb: "Unpin it",
    text: `${plain(row.name)} is pinned at ${count(pinned)} by ${plain(row.decision.pinned_by)}. The policy goes on from this number, and in or out as tasks come.`,
    run: async () => (await ctx.api.remove(path), "The policy decides again."),
  }), "quiet")];
}

function retry(row, ctx) {
  if (!ctx.may("admin") || !row.decision.trouble) return null;
  return button("Try again now", () => ctx.confirm({
    title: "Try again to start workers?", verb: "Try again",
    text: [`The autoscaler forgets the failed starts of ${plain(row.name)} and tries at once. What keeps them from coming up: ${plain(row.decision.trouble).slice(0, 300)}`],
    run: async () => ((await ctx.api.act(`v1/scaling/${pathOf(row.name)}/retry`)).at_once ? "The next try is now." : "No autoscaler leads; the next one tries at once."),
  }));
}
