// Webhooks: who hears of events, and what was delivered, waits or was given up.

import { h, name, plain } from "./dom.js";
import { count, seconds } from "./format.js";
import { button, card, heading, moment, state, table, tabs, taskLink } from "./parts.js";

const STATES = [["dead", "Given up"], ["due", "Due"], ["delivered", "Delivered"]];

export const webhooks = {
  title: "Webhooks",
  every: 10000,
  async load({ api, query, may }, signal) {
    const shown = query.get("state") || "dead";
    const [endpoints, deliveries] = await Promise.all([
      api.get("v1/webhook_endpoints", { limit: 100 }, signal),
      may("admin") ? api.optional("v1/webhook_deliveries", { state: shown, limit: 100 }, signal) : null,
    ]);
    return { endpoints: endpoints.data, deliveries };
  },
  draw({ endpoints, deliveries }, ctx) {
    const shown = ctx.query.get("state") || "dead";
    return [
      heading("Webhooks"),
      h("div", { class: "cards", "data-key": "cards" },
        card("Endpoints", { key: "endpoints" }, table(
          ["Endpoint", "State", "Name", "Tenant", ["URL", "wide"], "Hears of", ["", "actions"]],
          endpoints.map((row) => ({ key: row.id, cells: [h("span", { class: "mono" }, plain(row.id).slice(0, 20)), h("span", null, state(row.enabled ? "active" : "disabled"), row.disabled_because ? h("span", { class: "dim" }, ` ${plain(row.disabled_because).slice(0, 100)}`) : null), name(row.name, { most: 24 }), name(row.tenant, { most: 20 }), plain(row.url), plain(row.event_types.join(", ")), ctx.may("submit") ? test(row, ctx) : null] })),
          { label: "Endpoints", none: "No endpoint: POST /v1/webhook_endpoints makes one." })),
        deliveries ? card("Deliveries", { key: "deliveries" }, tabs("#/webhooks", ctx.query, "state", STATES, shown, "Deliveries by state"), table(
          ["Event", "About", "At", ["To", "wide"], ["Tries", "num"], ["Last answer", "wide"], ["", "actions"]],
          deliveries.data.map((row) => ({ key: row.id, cells: [plain(row.type), row.about.startsWith("batch") ? name(row.about, { most: 18 }) : taskLink(row.about.replace(/^resp_/, "")), moment(row.at, ctx.now()), plain(row.url), count(row.tries), last(row), shown === "due" ? null : replay(row, ctx)] })),
          { label: "Deliveries", none: shown === "dead" ? "None was given up." : "None." })) : null),
    ];
  },
};

function last(row) {
  const tried = row.attempts.at(-1);
  if (!tried) return h("span", { class: "dim" }, "not tried yet");
  return h("span", null, tried.status === null ? plain(tried.error) : `${tried.status} ${plain(tried.answer).slice(0, 120)}`, h("span", { class: "dim" }, ` after ${seconds(tried.latency_ms / 1000)}`));
}

const replay = (row, ctx) => button("Deliver again", () => ctx.confirm({
  title: "Deliver this event again?", verb: "Deliver it again",
  text: [`${plain(row.type)} about ${plain(row.about)} goes to ${plain(row.url)} now, with the webhook id that it had, so that the receiver can tell it from a new one.`],
  run: async () => (await ctx.api.act(`v1/webhook_deliveries/${encodeURIComponent(row.id)}/replay`), "It is due again."),
}));

const test = (row, ctx) => button("Send a test", () => ctx.confirm({
  title: "Send a test event?", verb: "Send it",
  text: [`A made-up ${plain(row.event_types[0] ?? "event")} is delivered once to ${plain(row.url)}, and its answer shown.`],
  run: async () => `The receiver answered ${(await ctx.api.post(`v1/webhook_endpoints/${encodeURIComponent(row.id)}/test`, { event_type: row.event_types[0] })).status_code}.`,
}), "quiet");
