// Rollouts of models: what each compared and decided, and why; begin, hold, move and end them.

import { between, chart } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { ago, amount, count, exactly, percent, plural, seconds, when } from "./format.js";
import { button, card, facts, field, link, modelName, moment, pathOf, state, table } from "./parts.js";

const REPORT_MS = 15000; // a report reads up to 2,000 rows
const SHOWN = 4; // reports at once
const UNDER_WAY = ["preparing", "judging", "paused"];

// The reports of rollouts that judge, of one model or of the latest.
export async function judged(list, chosen, api, signal) {
  const wanted = list.filter((rollout) => !chosen || rollout.model === chosen).slice(0, SHOWN);
  const reports = await Promise.all(wanted.map((rollout) => {
    const mark = `${rollout.begun_at} ${rollout.changed_at} ${rollout.phase}`;
    return api.within(UNDER_WAY.includes(rollout.phase) ? REPORT_MS : Infinity, mark, `v1/rollouts/${pathOf(rollout.model)}/report`, null, signal);
  }));
  return reports.filter(Boolean);
}

// Whether a rollout of the model is under way.
export const moving = (rollouts, model) => [...(rollouts?.judged ?? []), ...(rollouts?.data ?? [])].some((rollout) => rollout.model === model && [...UNDER_WAY, "starting"].includes(rollout.phase));

// All rollouts: a list, and a card for each that judges.
export function rollouts({ data, judged: list = [] }, details, chosen, ctx) {
  const shown = (rollout) => !chosen || rollout.model === chosen;
  // One that judges keeps a record for autoscalers, too, which says no more.
  const short = data.filter((rollout) => shown(rollout) && !list.some((other) => other.model === rollout.model && other.version === rollout.version && rollout.asked_at >= other.begun_at - 1));
  const rows = [
    ...list.filter(shown).map((rollout) => ({ ...rollout, asked_at: rollout.begun_at, judges: true })),
    ...short,
  ].sort((a, b) => b.asked_at - a.asked_at);
  return [
    card("Rollouts", { key: "rollouts" }, table(
      ["Model", "Phase", "From", "To", ["Part", "num"], "Begun", "Since", ["Why", "wide"], ["", "actions"]],
      rows.map((rollout) => ({ key: `${rollout.model} ${rollout.asked_at}`, cells: [
        link(`#/models?model=${encodeURIComponent(rollout.model)}`, modelName(rollout.model)), state(rollout.phase), h("span", { class: "mono" }, name(rollout.before, { most: 14 })), h("span", { class: "mono" }, name(rollout.version, { most: 14 })), rollout.judges ? percent(rollout.phase === "promoted" ? 1 : rollout.percent / 100) : "–",
        h("span", { title: exactly(rollout.asked_at) }, ago(rollout.asked_at, ctx.now())), h("span", { title: exactly(rollout.changed_at) }, ago(rollout.changed_at, ctx.now())), plain(rollout.reason || "–"), rollout.judges ? null : ended(rollout, ctx)] })),
      { label: "Rollouts", none: "No model was rolled out. “Start a rollout” gives a version a growing part of the tasks; penstock rollout NAME=MODEL replaces one while tasks run." })),
    ...details.map((report) => detail(report, ctx)),
  ];
}

function detail(report, ctx) {
  const { candidate, baseline } = report.tasks;
  const goes = UNDER_WAY.includes(report.phase);
  return card(`Rollout of ${plain(report.model)} to ${plain(report.version)}`, { key: `rollout ${report.model}` },
    h("p", null, state(report.phase), goes ? ` at ${percent(report.percent / 100)} of new tasks` : "", ": ", plain(report.reason), report.waits ? h("span", { class: "dim" }, `. Waits ${plain(report.waits)}.`) : null),
    facts([
      ["From", h("span", { class: "mono" }, plain(report.before))], ["Begun", h("span", null, moment(report.begun_at, ctx.now()), " by ", name(report.by, { most: 30 }))],
      ["Steps", `${report.steps.map((step) => amount(step)).join(", ")}, 100\u202f%`], ["A step lasts at least", `${seconds(report.hold_s)}, and ${plural(report.min_samples, "comparison")}`],
      ["Tasks compared", `${count(candidate)} of the candidate, ${count(baseline)} of the baseline`],
    ]),
    goes ? moves(report, ctx) : null,
    parts(report, goes, ctx),
    h("h3", null, "Decisions"), table(["At", "Decision", ["Part since", "num"], "By", ["Why", "wide"]],
      report.decisions.map((row, i) => ({ key: `d${i}`, cells: [moment(row.at, ctx.now()), plain(row.what).replaceAll("_", " "), percent(partOf(row) / 100), name(row.by, { most: 30 }), plain(row.reason)] })),
      { label: `Decisions on ${plain(report.model)}`, none: "None yet." }),
    h("h3", null, "Candidate beside baseline"), table(
      ["Metric", "Baseline", "Candidate", ["Comparisons", "num"], ["Difference, points", "grow"], ["Allowed", "num"], ["Odds it is worse", "num"], "Verdict"],
      report.metrics.map((row) => ({ key: row.name, cells: [
        h("span", { title: plain(row.text) }, plain(row.name).replaceAll("_", " ")), figures(row.baseline, row), figures(row.candidate, row), count(row.n),
        row.n ? h("span", { class: "pairing" }, between(row, { label: `${points(row.mean)} points, between ${points(row.lower)} and ${points(row.upper)}` }), h("span", null, points(row.mean))) : "–",
        String(Number((100 * row.margin).toFixed(1))), row.n ? `${row.odds >= 1e9 ? "over 1\u202fG" : amount(row.odds)} of ${count(row.limit)}` : "–", state(row.verdict)] })),
      { label: `Metrics of ${plain(report.model)}`, none: "Nothing is compared." }),
    h("p", { class: "dim empty" }, "Difference: points of a share; of times and lengths the part of comparisons in which the candidate is worse by more than the tolerance, less the part in which it is not, from −100 to +100. Dashed is what is allowed."));
}

const points = (share) => `${share > 0 ? "+" : ""}${Number((100 * share).toFixed(1))}`.replace("-", "−");

// Names of metrics whose values are times (s); of others they are tokens, shares or scores.
const TIMES = ["first_token", "per_token", "end_to_end", "end_to_end_p95"];
const TOKENS = ["longer", "shorter"];

function figures(values, { name, kind }) {
  const known = Object.entries(values).filter(([, value]) => value !== null);
  if (!known.length) return "–";
  const unit = TIMES.includes(name) ? seconds : kind === "score" ? amount : (value) => String(Number(value.toPrecision(3)));
  const text = known.map(([label, value]) => (label === "share" ? percent(value) : `${label} ${unit(value)}`)).join(", ");
  return TOKENS.includes(name) ? `${text} tokens` : text;
}

// Percent of the new tasks. One that is promoted has left the split: it is the default, and gets them all.
const partOf = (row) => (row.what === "promote" ? 100 : row.percent);

// The candidate's part since it began.
function parts(report, goes, ctx) {
  const rows = report.decisions.filter((row) => row.at > 0);
  if (rows.length < 2) return null;
  const at = [], values = [];
  rows.forEach((row, i) => {
    at.push(row.at);
    values.push(partOf(row));
    at.push(rows[i + 1]?.at ?? (goes ? ctx.now() : row.at));
    values.push(partOf(row));
  });
  return chart({ at, label: "Its part of new tasks", format: (value) => percent(value / 100), height: 70, since: when(at[0], ctx.now()), until: goes ? "now" : when(at.at(-1), ctx.now()), series: [{ name: "part", values, tone: "run" }] });
}

// ---- what changes something ----

function moves(report, ctx) {
  if (!ctx.may("admin")) return null;
  const version = plain(report.version);
  const next = report.steps[report.step + 1];
  const act = (what) => async () => `The rollout is ${(await ctx.api.act(`v1/rollouts/${pathOf(report.model)}/${what}`)).phase.replace("_", " ")}.`;
  const ask = (title, verb, text, what, danger) => button(verb, () => ctx.confirm({ title, verb, text, danger, run: act(what) }), danger ? "danger" : "");
  return h("div", { class: "actions" },
    report.phase === "judging" ? ask("Pause this rollout?", "Pause it", `${version} stays at ${percent(report.percent / 100)} of the new tasks of ${plain(report.model)} until it is resumed. It is still rolled back if it turns out worse.`, "pause") : null,
    report.phase === "paused" ? ask("Resume this rollout?", "Resume it", `It goes on from ${percent(report.percent / 100)}.`, "resume") : null,
    next === undefined ? null : ask("Go to the next step?", "Next step", `${version} gets ${percent(next / 100)} of the new tasks of ${plain(report.model)} now, whatever was compared.`, "promote"),
    ask("Make it the default?", "Promote it", `${version} becomes the default of ${plain(report.model)} and gets all new tasks now, past all steps. ${plain(report.before)} ends its own.`, "promote?full=true"),
    ask("End this rollout?", "End it", `${version} gets no new tasks; they go to ${plain(report.before)}. Tasks that it has run to their end.`, "abort", true));
}

function ended(rollout, ctx) {
  if (!ctx.may("admin") || rollout.phase !== "starting") return null;
  return button("End it", () => ctx.confirm({
    title: `End the rollout of ${plain(rollout.model)}?`, verb: "End it", danger: true,
    text: `Version ${plain(rollout.version)} gets no new tasks; they go on to ${plain(rollout.before)}. Workers that were started for it end.`,
    run: async () => `The rollout is ${(await ctx.api.act(`v1/rollouts/${pathOf(rollout.model)}/abort`)).phase}.`,
  }), "danger");
}

// A button that begins one; null where there is nothing to roll out.
export function starting(model, targets, now, ctx) {
  if (!targets.length) return null;
  return button("Start a rollout", () => ctx.confirm({
    title: `Roll out a version of ${plain(model.id)}?`, verb: "Start it",
    text: [`It gets a growing part of the tasks that name no version, and each step compares it with ${plain(now.default)}, the default. If it is worse, it is rolled back by itself; after the last step it is the default.`, "Its workers have to be up, or started: it waits for one at 0 %. A sweeper carries it out."],
    fields: [
      field("Version", (id) => h("select", { id, name: "to" }, targets.map((target) => h("option", { value: target }, plain(target))))),
      field("Steps, percent of new tasks", (id) => h("input", { id, name: "steps", required: true, value: "1, 5, 25, 50", autocomplete: "off" })),
      field("A step lasts at least, minutes", (id) => h("input", { id, name: "hold", type: "number", min: "0", step: "any", value: "10" })),
      field("Comparisons of a step, at least", (id) => h("input", { id, name: "samples", type: "number", min: "1", value: "50" })),
    ],
    run: async (form) => {
      const begun = await ctx.api.post(`v1/rollouts/${pathOf(model.id)}/start`, {
        to: String(form.get("to")), steps: String(form.get("steps")).split(/[,\s]+/).filter(Boolean).map(Number),
        hold_s: Number(form.get("hold")) * 60, min_samples: Math.round(Number(form.get("samples"))),
      });
      return `The rollout to ${begun.version} is ${begun.phase}.`;
    },
  }));
}
