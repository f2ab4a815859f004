// Models: versions, the workers that serve them, what they cost in time, and their last rollouts.

import { parts } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { ago, amount, count, exactly, percent, seconds } from "./format.js";
import { button, card, empty, facts, heading, link, modelName, state, table } from "./parts.js";

export const models = {
  title: "Models",
  every: 5000,
  async load({ api, clock }, signal) {
    const [list, fleet, now, rollouts, routing] = await Promise.all([
      api.get("v1/models", null, signal), api.optional("v1/fleet", { max_age: 3 }, signal), api.optional("v1/overview", { max_age: 3 }, signal), api.optional("v1/rollouts", null, signal), api.optional("v1/routing", null, signal),
    ]);
    clock(fleet?.at);
    // Aliases and versions are listed as models, too; they stand with their model here.
    return { list: list.data.filter((model) => !model.parent || model.adapter), fleet, now, rollouts, routing };
  },
  draw({ list, fleet, now, rollouts, routing }, ctx) {
    const chosen = ctx.query.get("model");
    const shown = chosen && list.some((model) => model.id === chosen) ? list.filter((model) => model.id === chosen) : list;
    return [
      heading("Models", chosen ? link("#/models", "All models") : null),
      h("div", { class: "cards", "data-key": "cards" },
        shown.length ? null : card(null, { key: "none" }, empty("No model is published. ", h("code", null, "penstock worker --model smollm2"), " serves one.")),
        shown.map((model) => one(model, fleet, now, routing?.data.find((state) => state.model === model.id), ctx)),
        rollouts ? card("Rollouts", { key: "rollouts" }, table(
          ["Model", "Phase", "From", "To", ["Workers", "num"], "Asked", "Since", ["Why", "wide"], ["", "actions"]],
          rollouts.data.map((rollout) => ({ key: rollout.model, cells: [modelName(rollout.model), state(rollout.phase), name(rollout.before, { most: 14 }), name(rollout.version, { most: 14 }), count(rollout.workers),
            h("span", { title: exactly(rollout.asked_at) }, ago(rollout.asked_at, ctx.now())), h("span", { title: exactly(rollout.changed_at) }, ago(rollout.changed_at, ctx.now())), plain(rollout.reason || "–"), ended(rollout, ctx)] })),
          { label: "Rollouts", none: "No model was rolled out. penstock rollout NAME=MODEL replaces a version while tasks run." })) : null),
    ];
  },
};

function one(model, fleet, now, routing, ctx) {
  const pools = (fleet?.pools ?? []).filter((pool) => pool.model === model.id);
  const row = now?.models.find((row) => row.name === model.id);
  return card(plain(model.id), { key: `model ${model.id}` },
    facts([
      model.adapter && ["An adapter of", modelName(model.parent)],
      ["Version for new tasks", h("span", { class: "mono" }, plain(model.version))],
      ["Context", `${count(model.context_length)} tokens`],
      ["Vocabulary", `${count(model.vocab_size)} tokens`],
      ["Can", plain(model.capabilities.join(", ")) || "–"],
      row && ["Tokens", `${amount(row.tokens_per_s)} /s, ${count(row.generated_tokens)} in all`],
      row && ["First token, last minute", `p50 ${seconds(row.first_token.p50)}, p95 ${seconds(row.first_token.p95)}`],
      row && ["Whole task, last minute", `p50 ${seconds(row.task_time.p50)}, p95 ${seconds(row.task_time.p95)}`],
      row && ["Ended", `${count(row.tasks.completed)} completed, ${count(row.tasks.failed)} failed, ${count(row.tasks.cancelled)} cancelled`],
      row && ["Overload", h("span", null, state(row.overload), row.pressure ? ` ${percent(row.pressure)} of the bound` : "")],
      Object.keys(model.defaults ?? {}).length && ["Its own defaults", h("span", { class: "mono" }, plain(JSON.stringify(model.defaults)).slice(0, 300))],
    ]),
    routing ? routed(routing, ctx) : null,
    model.adapter ? null : changes(model, routing ?? { generation: 0, default: model.version, aliases: {}, split: {} }, pools, ctx),
    fleet && !model.adapter ? [h("h3", null, "Versions"), table(
      ["Version", "New tasks", ["Workers", "num"], ["Ready", "num"], ["Wanted", "num"], ["Why", "wide"]],
      pools.map((pool) => ({ key: pool.name, cells: [h("span", { class: "mono" }, plain(pool.version ?? "whatever is current")), pool.current ? "yes" : "no", count(pool.workers), count(pool.ready), pool.desired === null ? "–" : count(pool.desired), pool.decision ? plain(pool.decision.trouble || pool.decision.reason) : "nobody scales it"] })),
      { label: "Versions", none: "No worker serves it, and nobody scales it." })] : null);
}

// Where new tasks go, if not simply to the card's version.
function routed(state, ctx) {
  const rest = Math.max(0, 100 - Object.values(state.split).reduce((sum, share) => sum + share, 0));
  const tones = ["run", "wait", "ok", "bad"];
  const shares = [...Object.entries(state.split), ...(rest ? [["default", rest]] : [])];
  return [
    h("h3", null, "Routing"),
    shares.length > 1 ? parts(shares.map(([target, share], i) => ({ size: share, tone: target === "default" ? "dim" : tones[i % 4], label: `${target} ${share} %` })), shares.map(([target, share]) => `${target} ${share} %`).join(", ")) : null,
    facts([
      ["New tasks", shares.map(([target, share], i) => [i ? ", " : "", name(target, { most: 24 }), ` ${share}\u202f%`])],
      Object.keys(state.aliases).length && ["Aliases", Object.entries(state.aliases).map(([alias, version], i) => [i ? ", " : "", name(alias, { most: 24 }), " → ", h("span", { class: "mono" }, plain(version))])],
      state.rules.length && ["Rules, before the split", state.rules.map((rule, i) => [i ? "; " : "", plain(rule.tenant ? `tenant ${rule.tenant}` : rule.tier ? `tier ${rule.tier}` : rule.header), " → ", name(rule.to, { most: 24 })])],
      ["Stays with its target", state.sticky === "tenant" ? "each tenant" : "each caller"],
      ["Changed", h("span", { title: exactly(state.changed_at) }, ago(state.changed_at, ctx.now()), " by ", name(state.by, { most: 30 }), `, generation ${count(state.generation)}`)],
    ]),
  ];
}

// ---- what changes something ----

const pathOf = (model) => model.split("/").map(encodeURIComponent).join("/");
let fieldNumber = 0;
function field(title, make) {
  const id = `field-${++fieldNumber}`;
  return h("div", null, h("label", { for: id }, title), make(id));
}

// Aliases and the split, from the generation that is shown: who changed them meanwhile is not overwritten.
function changes(model, now, pools, ctx) {
  if (!ctx.may("admin")) return null;
  const versions = [...new Set([now.default, ...pools.map((pool) => pool.version), ...Object.values(now.aliases)])].filter(Boolean);
  const targets = [...new Set([...Object.keys(now.aliases), ...Object.keys(now.split), ...versions])].filter((target) => target !== now.default);
  const send = (change) => ctx.api.post(`v1/routing/${pathOf(model.id)}`, { generation: now.generation, ...change });
  const alias = () => ctx.confirm({
    title: `Let an alias of ${plain(model.id)} name a version?`, verb: "Change the alias",
    text: `New tasks that name ${plain(model.id)}@ALIAS, or get it by the split or a rule, go to that version at once. Tasks that were accepted keep theirs.`,
    fields: [
      field("Alias", (id) => h("input", { id, name: "alias", required: true, maxlength: "64", autocomplete: "off", spellcheck: "false", value: Object.keys(now.aliases)[0] ?? "candidate" })),
      field("Version", (id) => h("select", { id, name: "version" }, versions.map((version) => h("option", { value: version }, plain(version))), h("option", { value: "" }, "none: remove the alias"))),
    ],
    run: async (form) => {
      const [name, version] = [String(form.get("alias")).trim(), String(form.get("version"))];
      await send({ aliases: { [name]: version || null } });
      return version ? `${name} names ${version} now.` : `There is no alias ${name} any more.`;
    },
  });
  const split = () => ctx.confirm({
    title: `Divide the new tasks of ${plain(model.id)}?`, verb: "Change the split",
    text: `Each gets so many percent of the tasks that name no version; ${plain(now.default)}, the default, gets the rest. It takes the place of the present split at once.`,
    fields: targets.map((target) => field(plain(target), (id) => h("input", { id, name: `to ${target}`, type: "number", min: "0", max: "100", step: "any", value: now.split[target] ?? "" }))),
    run: async (form) => {
      const shares = targets.map((target) => [target, Number(form.get(`to ${target}`))]).filter(([, share]) => share > 0);
      await send({ split: Object.fromEntries(shares) });
      return shares.length ? `The split is ${shares.map(([target, share]) => `${target} ${share} %`).join(", ")}.` : "All new tasks go to the default.";
    },
  });
  return h("div", { class: "actions" }, button("Change an alias", alias), targets.length ? button("Change the split", split) : null);
}

function ended(rollout, ctx) {
  if (!ctx.may("admin") || rollout.phase !== "starting") return null;
  return button("End it", () => ctx.confirm({
    title: `End the rollout of ${plain(rollout.model)}?`, verb: "End it", danger: true,
    text: `Version ${plain(rollout.version)} gets no new tasks; they go on to ${plain(rollout.before)}. Workers that were started for it end.`,
    run: async () => `The rollout is ${(await ctx.api.act(`v1/rollouts/${pathOf(rollout.model)}/abort`)).phase}.`,
  }), "danger");
}
