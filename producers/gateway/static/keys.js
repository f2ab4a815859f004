// API keys, their limits and those of their tenants, and who changed what.

import { h, name, plain } from "./dom.js";
import { count } from "./format.js";
import { button, card, heading, moment, pathOf, state, table } from "./parts.js";

const LIMITS = { rpm: "requests/min", tpm: "tokens/min", max_in_flight: "in flight", budget_tokens: "tokens/month", budget_money: "money/month", max_waiting: "waiting", max_streams: "streams", max_prompt: "prompt tokens", max_output: "output tokens", max_file_bytes: "bytes of files", max_files: "files", max_batches: "open batches", max_lines: "lines of batches", max_endpoints: "webhook endpoints", max_task_bytes: "bytes of tasks", max_idempotency_keys: "idempotency keys" };

const TENANTS = 20; // whose limits are asked for

export const keys = {
  title: "Keys",
  every: 20000,
  async load({ api, query }, signal) {
    const [list, changes] = await Promise.all([api.get("v1/keys", { tenant: query.get("tenant") }, signal), api.get("v1/audit", { limit: 100 }, signal)]);
    const tenants = [...new Set(list.data.filter((key) => key.state === "active").map((key) => key.tenant))].slice(0, TENANTS);
    const limited = await Promise.all(tenants.map((tenant) => api.within(60000, "", `v1/tenants/${pathOf(tenant)}/limits`, null, signal)));
    return { list: list.data, changes: changes.data, limited: limited.filter(Boolean) };
  },
  draw({ list, changes, limited }, ctx) {
    return [
      heading("Keys", ctx.caller.keys ? null : h("span", { class: "dim" }, "this gateway asks for none: --auth keys lets it")),
      h("div", { class: "cards", "data-key": "cards" },
        card("API keys", { key: "keys" }, table(
          ["Key", "State", "Tenant", "Name", "Scopes", "Models", ["Limits", "wide"], "Made", "Ends", ["", "actions"]],
          list.slice(0, 500).map((key) => ({ key: key.id, cells: [h("span", { class: "mono" }, plain(key.id)), state(key.state), name(key.tenant, { most: 24 }), name(key.name, { most: 24 }), key.scopes.join(", "), key.models.length ? name(key.models.join(", "), { most: 30 }) : "all", limits(key), moment(key.created_at, ctx.now()), key.expires_at ? moment(key.expires_at, ctx.now()) : "never", h("span", null, acts(key, ctx))] })),
          { label: "Keys", none: "No key: penstock keys create TENANT makes one." }), list.length > 500 ? h("p", { class: "dim" }, `500 of ${count(list.length)}.`) : null),
        list.length ? card("Limits of tenants, over all their keys", { key: "tenants" }, table(["Tenant", ["Limits", "wide"]], limited.filter((row) => limits(row) !== "none").map((row) => ({ key: `t${row.tenant}`, cells: [name(row.tenant, { most: 40 }), limits(row)] })), { label: "Limits of tenants", none: "None has any: penstock tenants limit TENANT sets some." })) : null,
        card("Who changed what", { key: "audit" }, table(["At", "Who", "Did", "To", "Tenant", "From"], changes.map((row, i) => ({ key: `${row.at} ${row.what} ${i}`, cells: [moment(row.at / 1000, ctx.now()), name(row.by, { most: 32 }), plain(row.did), name(row.what, { most: 40 }), name(row.tenant, { most: 20 }), name(row.address, { most: 40 })] })), { label: "Audit log", none: "Nothing was changed." }))),
    ];
  },
};

function limits(key) {
  const set = Object.entries(LIMITS).filter(([field]) => key[field] !== null && key[field] !== undefined);
  return set.length ? set.map(([field, unit]) => `${typeof key[field] === "number" ? count(key[field]) : plain(key[field])} ${unit}`).join(", ") : "none";
}

function acts(key, ctx) {
  const turn = (verb, title, text, danger) => button(title, () => ctx.confirm({
    title: `${title} this key?`, verb: title, danger,
    text: [`Key ${key.id} (“${plain(key.name)}”) of ${plain(key.tenant)}: ${text}`],
    run: async () => (await ctx.api.act(`v1/keys/${encodeURIComponent(key.id)}/${verb}`), `Done: ${title.toLowerCase()}.`),
  }), danger ? "danger" : "quiet");
  if (key.state === "active") return [turn("disable", "Disable", "it lets nobody in any more, on every gateway within a second, until it is enabled again."), " ", turn("revoke", "Revoke", "it ends for good, on every gateway within a second, and its open streams with it. This cannot be undone.", true)];
  if (key.state === "disabled") return [turn("enable", "Enable", "it lets its holder in again."), " ", turn("revoke", "Revoke", "it ends for good. This cannot be undone.", true)];
  return null;
}
