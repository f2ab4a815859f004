// Models: versions, the workers that serve them, what they cost in time, where new tasks go, and their last rollouts.

import { parts } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { ago, amount, count, exactly, percent, seconds } from "./format.js";
import { button, card, empty, facts, field, heading, link, modelName, pathOf, state, table, TIERS } from "./parts.js";
import { judged, moving, rollouts as rolledOut, starting } from "./rollouts.js";

const COPIES_MS = 15000; // a report on copies reads all pairs that are kept

export const models = {
  title: "Models",
  every: 5000,
  async load({ api, clock, query, may }, signal) {
    const seen = (path, age) => (may("metrics") ? api.optional(path, age, signal) : null);
    const [list, fleet, now, rollouts, routing] = await Promise.all([
      api.get("v1/models", null, signal), seen("v1/fleet", { max_age: 3 }), seen("v1/overview", { max_age: 3 }), seen("v1/rollouts"), seen("v1/routing"),
    ]);
    clock(fleet?.at);
    const chosen = query.get("model");
    const copied = (routing?.data ?? []).filter((state) => state.shadow && (!chosen || state.model === chosen)).slice(0, 4);
    const [reports, ...copies] = await Promise.all([
      judged(rollouts?.judged ?? [], chosen, api, signal),
      ...copied.map(({ model }) => api.within(COPIES_MS, "", `v1/shadows/${pathOf(model)}`, { limit: 0 }, signal)),
    ]);
    // Aliases and versions are listed as models, too; they stand with their model here.
    return { list: list.data.filter((model) => !model.parent || model.adapter), fleet, now, rollouts, routing, reports, copies };
  },
  draw({ list, fleet, now, rollouts, routing, reports, copies }, ctx) {
    const chosen = ctx.query.get("model");
    const states = routing?.data ?? [];
    // What a change made of a model's routing is shown at once: the next change begins with it.
    const keep = (changed) => {
      states.splice(0, states.length, ...states.filter((state) => state.model !== changed.model), changed);
      ctx.redraw();
    };
    const shown = chosen && list.some((model) => model.id === chosen) ? list.filter((model) => model.id === chosen) : list;
    return [
      heading("Models", chosen ? link("#/models", "All models") : null),
      h("div", { class: "cards", "data-key": "cards" },
        shown.length ? null : card(null, { key: "none" }, empty("No model is published. ", h("code", null, "penstock worker --model smollm2"), " serves one.")),
        shown.map((model) => one(model, fleet, now, states.find((state) => state.model === model.id), copies.find((report) => report?.model === model.id), rollouts, keep, ctx)),
        rollouts ? rolledOut(rollouts, reports, chosen, ctx) : null),
    ];
  },
};

function one(model, fleet, now, routing, copies, rollouts, keep, ctx) {
  const pools = (fleet?.pools ?? []).filter((pool) => pool.model === model.id);
  const row = now?.models.find((row) => row.name === model.id);
  const generates = model.capabilities.includes("generate");
  return card(plain(model.id), { key: `model ${model.id}` },
    facts([
      model.adapter && ["An adapter of", modelName(model.parent)],
      [model.adapter ? "Version" : "Version for new tasks", h("span", { class: "mono" }, plain(model.adapter?.version ?? model.version))],
      ["Context", `${count(model.context_length)} tokens`],
      ["Vocabulary", `${count(model.vocab_size)} tokens`],
      ["Can", plain(model.capabilities.join(", ")) || "–"],
      row && generates && ["Tokens", `${amount(row.tokens_per_s)} /s, ${count(row.generated_tokens)} in all`],
      row && generates && ["First token, last minute", both(row.first_token)],
      row && ["Whole task, last minute", both(row.task_time)],
      row && ["Ended", `${count(row.tasks.completed)} completed, ${count(row.tasks.failed)} failed, ${count(row.tasks.cancelled)} cancelled`],
      row && ["Overload", h("span", null, state(row.overload), row.pressure ? ` ${percent(row.pressure)} of the bound` : "")],
      Object.keys(model.defaults ?? {}).length && ["Its own defaults", plain(Object.entries(model.defaults).map(([field, value]) => `${field}\u00a0${JSON.stringify(value)}`).join(", ")).slice(0, 300)],
    ]),
    routing ? routed(routing, copies, ctx) : null,
    model.adapter ? null : changes(model, routing ?? { generation: 0, default: model.version, aliases: {}, split: {}, rules: [], stages: {} }, pools, rollouts, keep, ctx),
    fleet && !model.adapter ? [h("h3", null, "Versions"), table(
      ["Version", "New tasks", ["Workers", "num"], ["Ready", "num"], ["Wanted", "num"], ["Why", "wide"]],
      pools.map((pool) => ({ key: pool.name, cells: [h("span", { class: "mono" }, plain(pool.version ?? "whatever is current")), pool.current ? "yes" : "no", count(pool.workers), count(pool.ready), pool.desired === null ? "–" : count(pool.desired), pool.decision ? plain(pool.decision.trouble || pool.decision.reason) : "nobody scales it"] })),
      { label: "Versions", none: "No worker serves it, and nobody scales it." })] : null);
}

const both = ({ p50, p95 }) => `p50\u00a0${seconds(p50)}, p95\u00a0${seconds(p95)}`;

// Where new tasks go, if not simply to the card's version.
function routed(routing, copies, ctx) {
  const rest = Math.max(0, 100 - Object.values(routing.split).reduce((sum, share) => sum + share, 0));
  const tones = ["run", "wait", "ok", "bad"];
  const shares = [...Object.entries(routing.split), ...(rest ? [["default", rest]] : [])];
  return [
    h("h3", null, "Routing"),
    shares.length > 1 ? parts(shares.map(([target, share], i) => ({ size: share, tone: target === "default" ? "dim" : tones[i % 4], label: `${target} ${share} %` })), shares.map(([target, share]) => `${target} ${share} %`).join(", ")) : null,
    facts([
      ["New tasks", shares.map(([target, share], i) => [i ? ", " : "", name(target, { most: 24 }), ` ${share}\u202f%`])],
      Object.keys(routing.aliases).length && ["Aliases", Object.entries(routing.aliases).map(([alias, version], i) => [i ? ", " : "", name(alias, { most: 24 }), " → ", h("span", { class: "mono" }, plain(version))])],
      routing.rules.length && ["Rules, before the split", routing.rules.map((rule, i) => [i ? "; " : "", ruleText(rule), " → ", name(rule.to, { most: 24 })])],
      Object.keys(routing.stages).length && ["Stages", Object.entries(routing.stages).map(([version, stage], i) => [i ? ", " : "", h("span", { class: "mono" }, plain(version)), ` ${plain(stage)}`])],
      routing.approval && ["Approval", "traffic goes to approved versions alone"],
      routing.shadow && ["Shadow", h("span", null, `copies of ${percent(routing.shadow.percent / 100)} go to `, name(routing.shadow.to, { most: 24 }))],
      ["Stays with its target", routing.sticky === "tenant" ? "each tenant" : "each caller"],
      ["Changed", h("span", { title: exactly(routing.changed_at) }, ago(routing.changed_at, ctx.now()), " by ", name(routing.by, { most: 30 }), `, generation ${count(routing.generation)}`)],
    ]),
    copies ? shadowed(copies) : null,
  ];
}

// What copies of tasks said, beside the tasks.
function shadowed({ summaries, drops }) {
  const lost = Object.entries(drops);
  return [
    h("h3", null, "Copies beside their tasks"),
    table(["Version", "Copies went to", ["Pairs", "num"], ["Both completed", "num"], ["Same tokens", "num"], ["Same until they differ", "num"], ["Same end", "num"], ["Length", "num"], ["Time", "num"]],
      summaries.map((row) => ({ key: `${row.version} ${row.shadow}`, cells: [h("span", { class: "mono" }, plain(row.version)), h("span", { class: "mono" }, plain(row.shadow)), count(row.pairs), count(row.completed), percent(row.equal), percent(row.same), percent(row.same_reason), times(row.length), times(row.time)] })),
      { label: "Shadow traffic", none: "No copy has ended yet." }),
    lost.length ? h("p", { class: "dim" }, "Not copied or not compared: ", lost.map(([reason, number], i) => `${i ? ", " : ""}${count(number)} ${plain(reason)}`)) : null,
  ];
}
const times = (ratio) => (ratio === null ? "–" : `${amount(ratio)}\u202f×`);

// ---- what changes something ----

// Rollouts, and where new tasks go: from the generation that is shown: who changed them meanwhile is not overwritten.
function changes(model, now, pools, rollouts, keep, ctx) {
  if (!ctx.may("admin")) return null;
  const versions = [...new Set([now.default, ...pools.map((pool) => pool.version), ...Object.values(now.aliases), ...Object.keys(now.stages)])].filter(Boolean);
  const targets = [...new Set([...Object.keys(now.aliases), ...Object.keys(now.split), ...versions])].filter((target) => target !== now.default);
  const send = async (change) => {
    const changed = await ctx.api.post(`v1/routing/${pathOf(model.id)}`, { generation: now.generation, ...change });
    keep(changed);
    return changed;
  };
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
  const toDefault = () => ctx.confirm({
    title: `Change the default of ${plain(model.id)}?`, verb: "Change the default", danger: true,
    text: `All new tasks that neither name a version nor get one by a rule or the split go there at once, without any comparison. It is ${plain(now.default)} now. A rollout gets there by steps, and goes back by itself.`,
    fields: [field("Default", (id) => h("select", { id, name: "default" }, targets.map((target) => h("option", { value: target }, plain(target)))))],
    run: async (form) => `The default is ${(await send({ default: String(form.get("default")) })).default} now.`,
  });
  const rule = () => ctx.confirm({
    title: `Send some tasks of ${plain(model.id)} elsewhere?`, verb: "Add the rule",
    text: "New tasks that it fits go to the version or alias, before the split, at once. Of several rules the first that fits counts; this one is the last.",
    fields: [
      field("Tasks", (id) => h("select", { id, name: "by" }, [["tenant", "of the tenant"], ["tier", `of the tier (${TIERS.join(", ")})`], ["header", "with the header (Name: value)"]].map(([value, text]) => h("option", { value }, text)))),
      field("Which", (id) => h("input", { id, name: "which", required: true, maxlength: "500", autocomplete: "off", spellcheck: "false" })),
      field("Go to", (id) => h("select", { id, name: "to" }, [...targets, now.default].map((target) => h("option", { value: target }, plain(target))))),
    ],
    run: async (form) => `It has ${(await send({ rules: [...now.rules.map(bare), { to: String(form.get("to")), [form.get("by")]: String(form.get("which")).trim() }] })).rules.length} rules now.`,
  });
  const unrule = () => ctx.confirm({
    title: `Remove a rule of ${plain(model.id)}?`, verb: "Remove it", danger: true,
    text: "New tasks that it sent elsewhere go by the rules behind it, the split and the default at once.",
    fields: [field("Rule", (id) => h("select", { id, name: "rule" }, now.rules.map((each, i) => h("option", { value: String(i) }, `${ruleText(each)} → ${plain(each.to)}`))))],
    run: async (form) => `It has ${(await send({ rules: now.rules.filter((_, i) => String(i) !== form.get("rule")).map(bare) })).rules.length} rules now.`,
  });
  return h("div", { class: "actions" }, moving(rollouts, model.id) ? null : starting(model, targets, now, ctx), button("Change an alias", alias), targets.length ? [button("Change the split", split), button("Add a rule", rule)] : null, targets.length ? button("Change the default", toDefault) : null, now.rules.length ? button("Remove a rule", unrule) : null);
}

const ruleText = (rule) => plain(rule.tenant ? `tenant ${rule.tenant}` : rule.tier ? `tier ${rule.tier}` : rule.header);
// What a rule says: unset fields stay away.
const bare = (rule) => Object.fromEntries(Object.entries(rule).filter(([, value]) => value !== null));
