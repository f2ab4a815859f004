// Tasks that were given up, and messages that no worker could use.

import { h, name, plain } from "./dom.js";
import { count, plural, seconds } from "./format.js";
import { button, card, facts, heading, link, long, moment, note, table, taskLink } from "./parts.js";

const PAGE = 50;

export const deadLetters = {
  title: "Dead letters",
  every: 15000,
  async load({ api, query, rest }, signal) {
    if (rest[0]) return { one: await api.get(`v1/dead_letters/${encodeURIComponent(rest[0])}`, { index: query.get("index") }, signal) };
    return { page: await api.get("v1/dead_letters", { start: query.get("start") ?? 0, limit: PAGE }, signal) };
  },
  draw({ one, page }, ctx) {
    if (one) return letter(one, ctx);
    const start = Number(ctx.query.get("start") ?? 0);
    return [
      heading("Dead letters", h("span", { class: "dim" }, plural(page.total, "letter"))),
      h("div", { class: "cards", "data-key": "cards" }, card(null, { key: "list" },
        table(["Letter", "Since", "Task", "From", ["Why", "wide"], ["", "actions"]],
          page.data.map((row) => ({ key: row.key, cells: [link(`#/dead-letters/${row.key}?index=${row.index}`, row.key), moment(row.at, ctx.now()), row.task_id ? taskLink(row.task_id) : "–", name(row.list.replace("penstock:queue:", ""), { most: 32 }), plain(row.reason).slice(0, 300), act(row, ctx)] })),
          { label: "Dead letters", none: "None: no task was given up." }))),
      h("div", { class: "buttons", "data-key": "pages" },
        start ? button("Oldest", () => ctx.go("#/dead-letters")) : null, page.next !== null ? button("Later letters", () => ctx.go(`#/dead-letters?start=${page.next}`)) : null),
    ];
  },
};

function act(row, ctx, after) {
  if (!ctx.may("admin")) return null;
  const path = `v1/dead_letters/${row.key}`;
  const near = row.index === undefined ? "" : `?index=${row.index}`;
  return [
    button("Replay", () => ctx.confirm({
      title: "Replay this dead letter?", verb: "Replay it",
      text: [row.task_id ? `Task ${row.task_id} is submitted again under a new id; the failed one stays failed. The letter leaves the list.` : "Its message is put back into its list as it was. The letter leaves the list.", `It was given up because: ${plain(row.reason).slice(0, 400)}`],
      run: async () => {
        const done = await ctx.api.act(`${path}/replay${near}`);
        after?.();
        return done.new_task ? `It runs as task ${done.task_id}.` : "Its message is in its list again.";
      },
    })), " ",
    button("Remove", () => ctx.confirm({
      title: "Remove this dead letter?", verb: "Remove it", danger: true,
      text: ["The message is gone for good. The task's record stays until it expires."],
      run: async () => {
        await ctx.api.remove(`${path}${near}`);
        after?.();
        return "It is removed.";
      },
    }), "quiet"),
  ];
}

function letter(one, ctx) {
  const { record } = one;
  return [
    heading("Dead letter", h("span", { class: "mono" }, one.key), link("#/dead-letters", "All"), h("div", { class: "buttons" }, act(one, ctx, () => ctx.go("#/dead-letters")))),
    note("bad", h("b", null, "Why: "), plain(one.reason)),
    h("div", { class: "cards", "data-key": "cards" },
      card("Facts", { class: "half", key: "facts" }, facts([["Since", moment(one.at, ctx.now())], ["Task", one.task_id ? taskLink(one.task_id) : "it names none"], ["From", name(one.list)], record && ["Model", name(record.model)], record && ["Tenant", name(record.tenant)], record && ["Started", `${count(record.starts)} ×`], record && ["Workers that died with it", count(record.deaths)], one.record_error && ["Its record", plain(one.record_error)]])),
      card("Lost workers", { class: "half", key: "lost" }, table(["Worker", "At", ["Entries of its stream", "num"]], (record?.lost ?? []).map((loss, i) => ({ key: `l${i}`, cells: [name(loss.worker), moment(loss.at, ctx.now()), count(loss.entries)] })), { label: "Lost workers", none: "None is recorded." })),
      card("Message", { key: "message" }, long(one.message), one.message_characters > one.message.length ? h("p", { class: "dim" }, `${count(one.message_characters)} characters in all.`) : null)),
  ];
}
