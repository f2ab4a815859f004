// One task: where it is and why, its course, its starts, what it says at this moment, what it took.

import { bar } from "./charts.js";
import { h, name, plain, s } from "./dom.js";
import { amount, count, exactly, plural, seconds, time } from "./format.js";
import { button, card, copyable, facts, heading, link, long, modelName, moment, note, state, table, taskLink } from "./parts.js";

const PHASES = { submit: "Submitting", queue: "Waiting in the queue", worker: "At a worker, not begun", first_token: "Prompt (prefill)", output: "Output (decode)", settle: "Settling" };
const MAX_SHOWN = 200000; // characters of a live output that are kept
const EXPLAIN_MS = 5000; // an explanation looks at the whole fleet
let explained = {};
let live = null; // {id, stop, text: [by choice], tokens, state, comment}

export const task = {
  title: "Task",
  every: (data) => (data?.record.finished_at ? 20000 : 2000),
  async load({ api, rest }, signal) {
    const path = `v1/tasks/${encodeURIComponent(rest[0])}`;
    const record = await api.get(path, null, signal);
    const same = explained.id === record.id && explained.status === record.status;
    if (!same || Date.now() - explained.at > EXPLAIN_MS)
      explained = { id: record.id, status: record.status, at: Date.now(), why: await api.optional(`${path}/explain`, null, signal) };
    return { record, why: explained.why };
  },
  draw({ record, why }, ctx) {
    const final = Boolean(record.finished_at);
    if (!final) follow(record.id, ctx);
    document.title = `Task ${record.id.slice(0, 24)} · Penstock`;
    return [
      heading("Task", h("span", { class: "mono" }, plain(record.id)), state(record.status), h("div", { class: "buttons" }, actions(record, final, ctx))),
      why ? note(final ? (record.status === "completed" ? "ok" : "bad") : "info", final ? null : h("b", null, "Why: "), plain(why.summary), final ? "." : null) : null,
      h("div", { class: "cards stretch", "data-key": "cards" },
        card("Its course", { class: "two-thirds", key: "course" }, course(record, why, ctx)),
        card("Facts", { class: "third", key: "facts" }, particulars(record, ctx)),
        why && !final ? card("What keeps it", { class: why.attempts.length ? "half" : "", key: "why" }, blockers(why)) : null,
        why && (final || why.attempts.length) ? card("Starts", { class: final && record.error ? "two-thirds" : final ? "" : "half", key: "attempts" }, attempts(why, ctx)) : null,
        record.error ? card("Error", { class: "third", key: "error" }, facts([["Code", h("code", null, plain(record.error.code ?? "–"))], ["Message", plain(record.error.message ?? "–")]])) : null,
        card(final ? "Output" : "Output, as it is made", { key: "output" }, output(record, why, final)),
        Object.keys(record.metadata ?? {}).length ? card("Metadata", { key: "metadata" }, facts(Object.entries(record.metadata).map(([key, value]) => [plain(key), plain(value)]))) : null,
        card("From a shell", { key: "shell" }, copyable(`curl ${ctx.caller.keys ? '-H "Authorization: Bearer $PENSTOCK_API_KEY" ' : ""}${ctx.api.url(`v1/tasks/${encodeURIComponent(record.id)}/explain`)}`))),
    ];
  },
};

function actions(record, final, ctx) {
  const path = `v1/tasks/${encodeURIComponent(record.id)}`;
  return [
    !final && ctx.may("cancel") ? button("Cancel", () => ctx.confirm({
      title: "Cancel this task?", verb: "Cancel the task", danger: true,
      text: [`Task ${record.id} of ${plain(record.model)} ends as “cancelled”, within a step of its worker. What it has said stays readable. This cannot be undone.`],
      run: async () => ((await ctx.api.act(`${path}/cancel`)).accepted ? "It is cancelled." : "It had ended otherwise."),
    }), "danger") : null,
    final && ctx.may("submit") ? button("Run again", () => ctx.confirm({
      title: "Run this task again?", verb: "Submit it again",
      text: [`A new task with the same fields, seed and webhook is submitted for ${plain(record.model)}. This one stays as it is.`],
      run: async () => {
        const made = await ctx.api.post(`${path}/retry`);
        ctx.go(`#/tasks/${encodeURIComponent(made.id)}`);
        return `It runs again as ${made.id}.`;
      },
    })) : null,
  ];
}

function particulars(record, ctx) {
  const used = record.usage ?? {};
  return facts([
    ["Model", modelName(record.model)], ["Tier", record.tier], ["Tenant", name(record.tenant)], ["Came as", record.kind],
    ["Submitted", h("span", { title: exactly(record.created_at) }, moment(record.created_at, ctx.now()))],
    ["Choices", count(record.n)],
    record.usage && ["Prompt", `${count(used.prompt_tokens)} tokens${used.cached_tokens ? `, ${count(used.cached_tokens)} of them cached` : ""}`],
    record.usage && ["Output", `${count(used.completion_tokens ?? used.output_tokens)} tokens`],
    record.engine_seconds !== null && record.engine_seconds !== undefined && ["Engine time", seconds(record.engine_seconds)],
    record.joules && ["Energy", `${amount(record.joules)} J`],
    record.cost && ["Cost of its tokens", `${amount(Number(record.cost))} ${plain(record.currency)}`],
    record.shortened_to && ["Shortened by overload to", `${count(record.shortened_to)} tokens`],
    record.retried_from && ["Repeats", taskLink(record.retried_from)],
    record.webhook && ["Webhook", name(record.webhook.url, { most: 80 })],
    record.trace_id && ["Trace", h("span", { class: "mono" }, plain(record.trace_id))],
  ]);
}

// Phases as bars on one time axis, with marks where the engine took the task's room.
function course(record, why, ctx) {
  const end = record.settled_at ?? record.finished_at ?? Math.max(ctx.now(), record.created_at);
  const phases = Object.entries(why?.phases ?? {}).filter(([phase]) => phase in PHASES);
  const known = phases.reduce((sum, [, took]) => sum + took, 0);
  // It goes on since the explanation was made.
  if (phases.length && !record.finished_at) phases[phases.length - 1][1] += Math.max(0, end - record.created_at - known);
  const whole = Math.max(phases.reduce((sum, [, took]) => sum + took, 0), 1e-6);
  let from = 0;
  const rows = phases.flatMap(([phase, took], i) => {
    const x = (from / whole) * 1000;
    from += took;
    // The first step is written with the first token: until then a task that nothing keeps there may have begun.
    const begun = phase === "worker" && i === phases.length - 1 && !record.finished_at && !why.blocked_by.length;
    return [h("span", null, begun ? "At a worker" : PHASES[phase]), s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { x, y: 0, width: Math.max((took / whole) * 1000, 2), height: 10, class: phase })), h("span", null, seconds(took))];
  });
  const marks = (why?.attempts ?? []).flatMap((attempt) => attempt.preempted ?? []);
  const ends = (why?.attempts ?? []).filter((attempt) => attempt.at && !["ended", "running"].includes(attempt.why));
  const at = (moment) => ((moment - record.created_at) / whole) * 1000;
  if (marks.length || ends.length)
    rows.push(h("span", null, "Interrupted"), s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, [...marks, ...ends].map((mark) => s("rect", { x: Math.max(0, Math.min(995, at(mark.at))), y: 0, width: 5, height: 10, class: "mark" }))), h("span", null, plural(marks.length + ends.length, "time")));
  const tokens = record.usage?.completion_tokens ?? record.usage?.output_tokens;
  const decode = why?.phases?.output;
  return [
    rows.length ? h("div", { class: "gantt" }, rows) : h("p", { class: "dim" }, "Nobody wrote its times."),
    h("p", { class: "dim empty" }, `${time(record.created_at)} to ${record.finished_at ? time(end) : "now"}: ${seconds(end - record.created_at)} in all`, record.first_token_at ? `, the first token after ${seconds(record.first_token_at - record.created_at)}` : "", tokens > 1 && decode > 0 && record.finished_at ? `, then ${(tokens / decode).toPrecision(3)} tokens/s` : "", "."),
    marks.map((mark) => h("p", { class: "dim empty" }, `${time(mark.at)}: preempted (${plain(mark.why)})`)),
  ];
}

function blockers(why) {
  return [
    why.blocked_by.length ? h("ol", null, why.blocked_by.map((reason) => h("li", null, plain(reason.message)))) : h("p", { class: "dim" }, "Nothing keeps it."),
    facts([
      ["Go first", why.ahead === null ? "not known" : `${why.ahead_is_exact ? "" : "about "}${count(why.ahead)} of ${count(why.waiting)} that wait`],
      ["Starts in about", why.estimate.starts_in_s === null ? "not known" : seconds(why.estimate.starts_in_s)],
      ["Ends in about", why.eta ? `${seconds(why.eta.p50_s)}; nine of ten within ${seconds(why.eta.p90_s)}` : "not known"],
      ["Worker", why.worker ? name(why.worker) : "none yet"],
    ]),
  ];
}

function attempts(why, ctx) {
  return table(["Worker", "Ended", ["After", "num"], "At", ["Cached", "num"], ["Preempted", "num"]],
    why.attempts.map((attempt, i) => ({ key: `a${i}`, cells: [name(attempt.worker, { most: 24 }), plain(attempt.why).replace("_", " "), seconds(attempt.duration_s), moment(attempt.at, ctx.now()), attempt.cached_tokens === null ? "–" : `${count(attempt.cached_tokens)} tokens`, attempt.preemptions ? `${count(attempt.preemptions)} ×` : "–"] })),
    { label: "Starts", none: "No worker has started it." });
}

// Why there is nothing to read yet.
const unread = (why) => h("p", { class: "dim" }, why?.output_at_end ? `Nothing yet: ${plain(why.output_at_end)}.` : live?.comment ? plain(live.comment) : "No token yet.");

function output(record, why, final) {
  if (final) {
    stopFollowing();
    if (record.rows) return long(JSON.stringify(record.rows));
    if (!record.choices?.length) return h("p", { class: "dim" }, "There is no output.");
    return record.choices.map((choice) => [
      h("h3", null, record.choices.length > 1 ? `Choice ${choice.index}` : "Text", h("span", { class: "dim" }, ` ${plural(choice.token_ids?.length ?? 0, "token")}, ended by ${plain(choice.finish_reason ?? "nothing")}`)), long(choice.text)]);
  }
  if (!live) return unread(why);
  return [
    live.problem ? note("bad", plain(live.problem)) : null,
    live.text.length ? live.text.map((text, i) => [live.text.length > 1 ? h("h3", null, `Choice ${i}`) : null, h("pre", { class: "text caret", dir: "auto", "aria-label": "Output so far" }, plain(text ?? ""))]) : unread(why),
    live.text.length ? h("p", { class: "dim empty" }, plural(live.tokens, "token"), " so far") : null,
  ];
}

// Follow the task's stream, from its beginning, until it ends or the page is left.
async function follow(id, ctx) {
  if (live?.id === id) return;
  stopFollowing();
  const stop = new AbortController();
  ctx.left.addEventListener("abort", () => live === mine && stopFollowing(), { once: true });
  const mine = (live = { id, stop, text: [], tokens: 0, comment: "", problem: "" });
  let drawing = 0;
  const redraw = () => (drawing ||= setTimeout(() => ((drawing = 0), live === mine && ctx.rest[0] === id ? ctx.redraw() : stop.abort()), 100));
  let position = 0;
  for (let tries = 0; tries < 30 && !stop.signal.aborted; tries++) {
    try {
      for await (const { event, data, comment } of ctx.api.events(`v1/tasks/${encodeURIComponent(id)}/events`, { query: { from: position }, signal: stop.signal })) {
        if (comment) mine.comment = comment === "still here" ? "" : comment;
        if (event === "token") {
          const token = JSON.parse(data);
          const text = mine.text[token.choice] ?? "";
          if (text.length < MAX_SHOWN) mine.text[token.choice] = text + token.text;
          mine.tokens += 1;
          position = token.position + 1;
        } else if (event === "end") {
          ctx.refresh();
          return;
        } else if (event === "error") throw new Error(JSON.parse(data).error?.message ?? "The stream ended.");
        mine.problem = "";
        redraw();
      }
      if (position === 0) return;
    } catch (error) {
      if (stop.signal.aborted) return;
      const lasting = error.status === 403 || error.status === 404; // it was deleted, or an older gateway answers
      mine.problem = lasting ? error.message : `${error.message} It is taken up again.`;
      redraw();
      if (lasting) return;
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(1000 * 2 ** tries, 15000)));
  }
}

export function stopFollowing() {
  live?.stop.abort();
  live = null;
}
