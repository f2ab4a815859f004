// Tasks and requests, the latest first.

import { h, name } from "./dom.js";
import { count, seconds } from "./format.js";
import { button, card, heading, modelName, moment, state, table, tabs, taskLink, TIERS } from "./parts.js";

const STATES = [["", "All"], ["queued", "Waiting"], ["in_progress", "Running"], ["failed", "Failed"], ["completed", "Completed"], ["cancelled", "Cancelled"], ["incomplete", "Incomplete"]];
const KINDS = [["all", "Tasks and requests"], ["task", "Tasks"], ["request", "Requests that wait"], ["response", "Responses"]];

export const tasks = {
  title: "Tasks",
  // A filter that few tasks match reads two thousand records.
  every: (page, { query }) => (["status", "model", "tier"].some((field) => query.get(field)) || !["all", null].includes(query.get("kind")) ? 15000 : 4000),
  async load({ api, query }, signal) {
    const asked = { kind: query.get("kind") || "all", limit: 50 };
    for (const field of ["status", "model", "tier", "tenant", "after"]) asked[field] = query.get(field);
    return api.get("v1/tasks", asked, signal);
  },
  draw(page, ctx) {
    const { query } = ctx;
    const set = (field) => (event) => {
      const next = new URLSearchParams(ctx.query);
      const value = event.currentTarget.value.trim();
      if (value) next.set(field, value);
      else next.delete(field);
      next.delete("after");
      ctx.go(`#/tasks?${next}`);
    };
    const next = new URLSearchParams(query);
    if (page.last_id) next.set("after", page.last_id);
    return [
      heading("Tasks"),
      h("div", { "data-key": "tabs" }, tabs("#/tasks", query, "status", STATES, query.get("status"), "By state")),
      h("div", { class: "filters", "data-key": "filters" },
        h("label", null, "Came as", h("select", { on: { change: set("kind") } }, KINDS.map(([value, text]) => h("option", { value, selected: value === (query.get("kind") || "all") }, text)))),
        h("label", null, "Tier", h("select", { on: { change: set("tier") } }, [["", "All tiers"], ...TIERS.map((tier) => [tier, tier])].map(([value, text]) => h("option", { value, selected: value === (query.get("tier") ?? "") }, text)))),
        h("label", null, "Model", h("input", { value: query.get("model") ?? "", maxlength: "200", on: { change: set("model") } })),
        ctx.caller.sees_all ? h("label", null, "Tenant", h("input", { value: query.get("tenant") ?? "", maxlength: "200", on: { change: set("tenant") } })) : null),
      h("div", { class: "cards", "data-key": "cards" }, card(null, { key: "list" }, table(
        ["Task", "State", "Model", "Tier", "Tenant", "Submitted", ["Waited", "num"], ["First token", "num"], ["Took", "num"], ["Tokens in", "num"], ["out", "num"], "Error"],
        page.data.map((task) => ({ key: task.id, cells: row(task, ctx.now()) })),
        { label: "Tasks", none: page.has_more ? "None of the 2,000 tasks that were looked at matches. Go on, or change the filter." : "No task matches." }))),
      h("div", { class: "buttons", "data-key": "pages" },
        query.get("after") ? button("Latest", () => {
          const start = new URLSearchParams(ctx.query);
          start.delete("after");
          ctx.go(`#/tasks?${start}`);
        }) : null,
        page.has_more ? button("Earlier tasks", () => ctx.go(`#/tasks?${next}`)) : null),
    ];
  },
};

function row(task, now) {
  const gap = (from, to) => (from && to ? seconds(to - from) : "–");
  const waited = task.started_at ? gap(task.created_at, task.started_at) : task.finished_at ? "–" : seconds(now - task.created_at);
  return [
    taskLink(task.id), state(task.status), modelName(task.model), task.tier, name(task.tenant, { most: 20 }), moment(task.created_at, now), waited,
    gap(task.created_at, task.first_token_at), gap(task.created_at, task.finished_at), count(task.usage?.prompt_tokens), count(task.usage?.completion_tokens ?? task.usage?.output_tokens),
    task.error ? name(task.error.message ?? task.error.code, { most: 48 }) : "",
  ];
}
