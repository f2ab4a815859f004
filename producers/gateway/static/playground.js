// Try a model: a chat that streams, an output of a schema, vectors; and the same as curl.

import { h, name, plain } from "./dom.js";
import { amount, count, plural, seconds } from "./format.js";
import { button, card, copyable, heading, note, tabs } from "./parts.js";

const MODES = [["", "Chat"], ["json", "Structured output"], ["vectors", "Embeddings"]];
const SCHEMA = { type: "object", properties: { name: { type: "string" }, capital: { type: "string" }, population: { type: "integer" } }, required: ["name", "capital", "population"], additionalProperties: false };
let conversation = []; // kept while other pages are looked at
let typed = { system: "", prompt: "", schema: JSON.stringify(SCHEMA, null, 2), texts: "A penstock feeds a turbine.\nWater falls through the pipe.\nIt rains in Bern.", tokens: "300", temperature: "0.7", tier: "default", model: "" };

export const playground = {
  title: "Playground",

  mount(ctx, signal) {
    const mode = ctx.query.get("mode") ?? "";
    const talk = h("div", { class: "talk", role: "log", "aria-label": "Conversation", "aria-live": "polite" });
    const about = h("p", { class: "dim", role: "status" });
    const code = h("div", null);
    let running = null;
    const keep = (field) => (event) => ((typed[field] = event.currentTarget.value), curl());
    const model = h("select", { id: "pg-model", on: { change: keep("model") } });
    const field = (label, input) => h("label", null, label, input);
    const prompt = h("textarea", { id: "pg-prompt", rows: "3", value: typed.prompt, placeholder: "Write to the model. Ctrl+Enter sends.", on: { input: keep("prompt"), keydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && (event.preventDefault(), send()) } });
    const go = button(mode === "vectors" ? "Make vectors" : "Send", () => (running ? running.abort() : send()), "primary");

    ctx.api.get("v1/models", null, signal).then(({ data }) => {
      const usable = data.filter((one) => one.capabilities.includes(mode === "vectors" ? "embed" : "chat") || (!mode && one.capabilities.includes("generate")));
      const shown = usable.length ? usable : data;
      model.replaceChildren(...shown.map((one) => h("option", { value: one.id, selected: one.id === typed.model }, plain(one.id))));
      typed.model = model.value;
      if (!data.length) about.textContent = "No model is served. Start a worker: penstock worker --model smollm2.";
      else if (!usable.length) about.textContent = `No model here can do this: ${data.map((one) => one.id).slice(0, 5).map(plain).join(", ")} cannot.`;
      curl();
    }, (error) => !signal.aborted && (about.textContent = plain(error.message)));

    const request = () => {
      if (mode === "vectors") return ["v1/embeddings", { model: typed.model, input: typed.texts.split("\n").filter((line) => line.trim()).slice(0, 64) }];
      const messages = [...(mode !== "json" && typed.system.trim() ? [{ role: "system", content: typed.system }] : []), ...(mode === "json" ? [] : conversation.map(({ role, content }) => ({ role, content }))), { role: "user", content: typed.prompt || "Name a country and its capital." }];
      const body = { model: typed.model, messages, max_completion_tokens: Number(typed.tokens) || 300, temperature: Number(typed.temperature), service_tier: typed.tier, stream: true, stream_options: { include_usage: true } };
      if (mode === "json") {
        let schema = SCHEMA;
        try {
          schema = JSON.parse(typed.schema);
        } catch {} // the reader is still typing; sending says so
        body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
      }
      return ["v1/chat/completions", body];
    };

    function curl() {
      const [path, body] = request();
      const data = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
      const text = `curl -N ${ctx.api.url(path)} -H 'Content-Type: application/json'${ctx.caller.keys ? " \\\n  -H \"Authorization: Bearer $PENSTOCK_API_KEY\"" : ""} \\\n  -d '${data}'`;
      code.replaceChildren(copyable(text));
    }

    function bubble(role, text) {
      const box = h("div", { class: role, dir: "auto" }, plain(text));
      talk.append(box);
      box.scrollIntoView({ block: "nearest" });
      return box;
    }

    // What a model thought before it answered: read by who opens it, and not sent back.
    function thoughts(text, open) {
      const shown = h("pre", null, plain(text));
      talk.append(h("details", { class: "reasoning", open }, h("summary", null, "Reasoning"), shown));
      return shown;
    }

    async function send() {
      if (running || !typed.model) return;
      if (mode !== "vectors" && !prompt.value.trim()) return prompt.focus();
      if (mode === "json") {
        try {
          JSON.parse(typed.schema);
        } catch (error) {
          about.textContent = `The schema is no JSON: ${plain(error.message)}`;
          return;
        }
      }
      running = new AbortController();
      signal.addEventListener("abort", () => running?.abort(), { once: true });
      go.textContent = "Stop";
      about.textContent = "Sent…";
      try {
        await (mode === "vectors" ? embed() : chat());
      } catch (error) {
        if (!running.signal.aborted) bubble("error", error.message);
        about.textContent = running.signal.aborted ? "Stopped." : "";
      } finally {
        running = null;
        go.textContent = mode === "vectors" ? "Make vectors" : "Send";
        curl();
      }
    }

    async function chat() {
      const [path, body] = request();
      if (mode === "json") talk.replaceChildren();
      bubble("user", typed.prompt);
      const began = performance.now();
      let box = null, thinking = null, text = "", reasoning = "", first = null, used = null, why = null;
      const answer = () => {
        box = bubble("assistant", "");
        box.classList.add("caret");
        box.setAttribute("aria-busy", "true");
      };
      try {
        for await (const { data, comment } of ctx.api.events(path, { body, signal: running.signal })) {
          if (comment && comment !== "still here" && !text) about.textContent = plain(comment);
          if (!data || data === "[DONE]") continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Error(chunk.error.message);
          used = chunk.usage ?? used;
          const choice = chunk.choices?.[0];
          why = choice?.finish_reason ?? why;
          if (choice?.delta?.reasoning_content) {
            first ??= performance.now();
            thinking ??= thoughts("", true);
            reasoning += choice.delta.reasoning_content;
            thinking.textContent = plain(reasoning);
            thinking.scrollIntoView({ block: "nearest" });
          }
          if (choice?.delta?.content) {
            first ??= performance.now();
            if (box === null) answer();
            text += choice.delta.content;
            box.textContent = plain(text);
            box.scrollIntoView({ block: "nearest" });
          }
        }
      } finally {
        box?.classList.remove("caret");
        box?.removeAttribute("aria-busy");
        if (thinking && text) thinking.parentElement.open = false;
      }
      if (mode !== "json") conversation.push({ role: "user", content: typed.prompt }, { role: "assistant", content: text, reasoning });
      const took = (performance.now() - began) / 1000;
      const wait = first === null ? null : (first - began) / 1000;
      const rate = used && first !== null && used.completion_tokens > 1 ? (used.completion_tokens - 1) / Math.max(took - wait, 1e-3) : null;
      about.textContent = [wait !== null && `first token after ${seconds(wait)}`, used && `${plural(used.completion_tokens, "token")} in ${seconds(took)}`, used?.completion_tokens_details?.reasoning_tokens && `${count(used.completion_tokens_details.reasoning_tokens)} of them reasoning`, rate && `${amount(rate)} tokens/s`, used && `prompt ${count(used.prompt_tokens)} tokens${used.prompt_tokens_details?.cached_tokens ? `, ${count(used.prompt_tokens_details.cached_tokens)} cached` : ""}`, why === "length" && "cut at the limit of tokens"].filter(Boolean).join(" · ");
      typed.prompt = prompt.value = "";
      prompt.focus();
    }

    async function embed() {
      const [path, body] = request();
      const began = performance.now();
      const answer = await ctx.api.post(path, body, running.signal);
      const vectors = answer.data.map((row) => row.embedding);
      const norm = (v) => Math.sqrt(v.reduce((sum, x) => sum + x * x, 0)) || 1;
      const alike = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0) / norm(a) / norm(b);
      talk.replaceChildren(h("div", { class: "assistant" }, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarities" }, h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "Cosine similarity"), vectors.map((_, i) => h("th", { scope: "col", class: "num" }, String(i + 1))))),
        h("tbody", null, vectors.map((row, i) => h("tr", null, h("th", { scope: "row" }, `${i + 1} `, name(body.input[i], { most: 40 })), vectors.map((other) => h("td", { class: "num" }, alike(row, other).toFixed(3))))))))));
      about.textContent = `${plural(vectors.length, "vector")} of ${count(vectors[0]?.length)} numbers in ${seconds((performance.now() - began) / 1000)} · ${count(answer.usage?.prompt_tokens)} tokens`;
    }

    if (mode === "") for (const { role, content, reasoning } of conversation) {
      if (reasoning) thoughts(reasoning, false);
      if (content) bubble(role, content);
    }
    const settings = h("div", { class: "filters" }, field("Model", model),
      mode === "vectors" ? null : [
        field("Most tokens", h("input", { id: "pg-tokens", type: "number", min: "1", max: "8192", value: typed.tokens, on: { input: keep("tokens") } })),
        field("Temperature", h("input", { id: "pg-temperature", type: "number", min: "0", max: "2", step: "0.1", value: typed.temperature, on: { input: keep("temperature") } })),
        field("Tier", h("select", { id: "pg-tier", on: { change: keep("tier") } }, ["default", "priority", "flex"].map((tier) => h("option", { value: tier, selected: tier === typed.tier }, tier)))),
      ]);
    curl();
    return [
      heading("Playground"),
      h("div", { "data-key": "tabs" }, tabs("#/playground", ctx.query, "mode", MODES, mode, "What to try")),
      h("div", { class: "cards" },
        card(null, { class: "two-thirds", key: "try" }, settings,
          mode === "vectors" ? h("label", null, "Texts, one a line", h("textarea", { id: "pg-texts", rows: "6", value: typed.texts, on: { input: keep("texts") } })) : [
            mode === "json" ? h("label", null, "JSON schema", h("textarea", { id: "pg-schema", class: "mono", rows: "9", spellcheck: "false", value: typed.schema, on: { input: keep("schema") } })) : h("label", null, "System message", h("input", { id: "pg-system", value: typed.system, placeholder: "none", on: { input: keep("system") } }))],
          h("div", { class: "spaced" }), talk, mode === "vectors" ? null : h("label", null, h("span", { class: "sr" }, "Message"), prompt),
          h("div", { class: "buttons" }, mode === "" ? button("New conversation", () => ((conversation = []), talk.replaceChildren(), (about.textContent = ""), curl(), prompt.focus()), "quiet") : null, go), about),
        card("The same from a shell", { class: "third", key: "shell" }, code, h("p", { class: "dim" }, "It goes through the queue as any other request: ", h("a", { href: "#/tasks?kind=request" }, "see it among the tasks"), "."))),
    ];
  },
};
