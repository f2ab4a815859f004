// Batches: files of requests, and how far they are.

import { parts } from "./charts.js";
import { h, name, plain } from "./dom.js";
import { ago, count, exactly, percent, seconds } from "./format.js";
import { button, card, heading, moment, state, table } from "./parts.js";

const OPEN = ["validating", "in_progress", "finalizing"];

export const batches = {
  title: "Batches",
  every: 8000,
  async load({ api, query, may }, signal) {
    const [page, sources] = await Promise.all([
      api.get("v1/batches", { limit: 50, after: query.get("after") }, signal),
      may("metrics") ? api.optional("v1/sources", null, signal) : null,
    ]);
    return { page, sources };
  },
  draw({ page, sources }, ctx) {
    return [
      heading("Batches"),
      h("div", { class: "cards", "data-key": "cards" }, card(null, { key: "list" }, table(
        ["Batch", "State", "For", "Made", ["Lines", "grow"], ["Done", "num"], ["Failed", "num"], "Ends at the latest", "Files", ["", "actions"]],
        page.data.map((batch) => ({ key: batch.id, cells: row(batch, ctx) })),
        { label: "Batches", none: "No batch: penstock batch submit FILE makes one, or POST /v1/batches, or a file in a watched folder or bucket." })),
        sources ? card("Schedules", { class: "half", key: "schedules" }, table(["Schedule", "Last fired"],
          sources.schedules.map((row) => ({ key: row.name, cells: [name(row.name), row.last_at ? h("span", { title: exactly(row.last_at) }, ago(row.last_at, ctx.now())) : "–"] })), { label: "Schedules", none: "No schedule has fired: penstock sources makes tasks and files by cron expressions." })) : null,
        sources ? card("Replies of sources", { class: "half", key: "replies" }, table(["Source", ["Due", "num"], ["Oldest", "num"]],
          sources.replies.map((row) => ({ key: row.source, cells: [name(row.source), count(row.due), seconds(row.oldest_due_s)] })), { label: "Replies", none: "No reply to a message waits." })) : null,
        sources?.items?.length ? card("What sources took", { key: "items" }, table(["Source", ["Done", "num"], ["Refused", "num"], ["Missed", "num"]],
          sources.items.map((row) => ({ key: row.source, cells: [name(row.source), count(row.done), count(row.refused), count(row.missed)] })), { label: "What sources took" }),
          h("p", { class: "dim empty" }, "Messages, files and times. Refused messages are among the source's dead letters.")) : null),
      h("div", { class: "buttons", "data-key": "pages" }, ctx.query.get("after") ? button("Latest", () => ctx.go("#/batches")) : null, page.has_more ? button("Earlier batches", () => ctx.go(`#/batches?after=${encodeURIComponent(page.last_id)}`)) : null),
    ];
  },
};

function row(batch, ctx) {
  const { total, completed, failed } = batch.request_counts;
  const why = batch.errors?.data[0];
  const file = (id, text) => (id ? [button(text, () => download(id, ctx), "quiet"), " "] : null);
  return [
    name(batch.id, { most: 18 }), h("span", null, state(batch.status), why ? h("span", { class: "dim" }, ` ${plain(why.message).slice(0, 120)}`) : null), plain(batch.endpoint), moment(batch.created_at, ctx.now()),
    parts([{ size: completed, tone: "ok", label: "done" }, { size: failed, tone: "bad", label: "failed" }, { size: Math.max(0, total - completed - failed), tone: "none" }], total ? `${percent((completed + failed) / total)} of ${count(total)} lines` : "not counted yet"),
    `${count(completed)} of ${count(total)}`, count(failed), OPEN.includes(batch.status) ? moment(batch.expires_at, ctx.now()) : "–",
    h("span", null, file(batch.output_file_id, "Answers"), file(batch.error_file_id, "Errors")),
    OPEN.includes(batch.status) && ctx.may("cancel") ? button("Cancel", () => ctx.confirm({
      title: "Cancel this batch?", verb: "Cancel the batch", danger: true,
      text: [`The ${count(total - completed - failed)} lines of ${batch.id} that have not ended are cancelled. Those that have are written to its files.`],
      run: async () => (await ctx.api.act(`v1/batches/${encodeURIComponent(batch.id)}/cancel`), "It is being cancelled."),
    }), "danger") : null,
  ];
}

async function download(id, ctx) {
  try {
    const text = await ctx.api.text(`v1/files/${encodeURIComponent(id)}/content`);
    const at = URL.createObjectURL(text);
    const anchor = h("a", { href: at, download: `${id}.jsonl` });
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(at), 10000);
  } catch (error) {
    ctx.say(error.message, true);
  }
}
