// The gateway's endpoints. The key is in this module's memory alone, and goes to this gateway alone.

const BASE = new URL(".", document.baseURI);
const PATIENCE_MS = 15000;
let key = null;

export class Refused extends Error {
  constructor(status, code, message, retryAfter) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

let kept = new Map(); // url -> {mark, at, value}

export const setKey = (text) => {
  key = text;
  kept.clear(); // another caller may not see it
};
export const hasKey = () => key !== null;

// Dots alone would lead to another endpoint.
const DOTS = /^(\.|%2e){1,2}$/i;

export function url(path, query) {
  if (path.split("/").some((part) => DOTS.test(part))) throw new Refused(0, "no_name", "A name of dots alone is none.");
  const full = new URL(path.replace(/^\//, ""), BASE);
  for (const [name, value] of Object.entries(query ?? {}))
    if (value !== null && value !== undefined && value !== "") full.searchParams.set(name, value);
  return full;
}

function headers(body) {
  const sent = new Headers();
  if (key !== null) sent.set("authorization", `Bearer ${key}`);
  if (body !== undefined) sent.set("content-type", "application/json");
  return sent;
}

async function ask(method, path, query, body, signal) {
  const patience = AbortSignal.timeout(PATIENCE_MS);
  const limit = signal ? AbortSignal.any([signal, patience]) : patience;
  const [at, data] = [url(path, query), body === undefined ? undefined : JSON.stringify(body)];
  let answer;
  try {
    answer = await fetch(at, { method, headers: headers(body), body: data, signal: limit });
  } catch (error) {
    if (signal?.aborted) throw error;
    const why = patience.aborted ? `no answer within ${PATIENCE_MS / 1000} s` : "no answer";
    throw new Refused(0, "no_answer", `The gateway gave ${why}.`);
  }
  return answer.ok ? answer : Promise.reject(await refusal(answer, path));
}

async function refusal(answer, path) {
  const after = Number(answer.headers.get("retry-after")) || null;
  try {
    const { error } = await answer.json();
    if (error.code === "not_found") // the URL, not what it names
      return new Refused(answer.status, "not_found", `The gateway that answers has no /${path}: it is of an earlier release than this page.`, after);
    return new Refused(answer.status, String(error.code), String(error.message), after);
  } catch {
    return new Refused(answer.status, "unreadable", `The gateway answered ${answer.status}.`, after);
  }
}

async function json(answer) {
  if (answer.status === 204) return null;
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "no_answer", "The gateway's answer was cut.");
  }
}

export const get = async (path, query, signal) => json(await ask("GET", path, query, undefined, signal));
export const post = async (path, body, signal) => json(await ask("POST", path, null, body ?? {}, signal));
export const act = async (path) => json(await ask("POST", path, null, undefined));
export const remove = async (path) => json(await ask("DELETE", path, null, undefined));

export const text = async (path) => (await ask("GET", path)).blob();

// What the caller may not see, or an older gateway does not have, is null; other errors are thrown.
export async function optional(path, query, signal) {
  try {
    return await get(path, query, signal);
  } catch (error) {
    if (error instanceof Refused && (error.status === 403 || error.status === 404)) return null;
    throw error;
  }
}

// As `optional`, of what is dear to read: an answer stands for `ms`, unless `mark` has changed.
export async function within(ms, mark, path, query, signal) {
  const at = url(path, query).href;
  const hit = kept.get(at);
  if (hit?.mark === mark && Date.now() - hit.at < ms) return hit.value;
  const value = await optional(path, query, signal);
  if (kept.size > 50) kept.clear();
  kept.set(at, { mark, at: Date.now(), value });
  return value;
}

// Server-sent events as {event, data}; comments are given as {comment}. Ends when the stream does.
export async function* events(path, { query, body, signal } = {}) {
  const method = body === undefined ? "GET" : "POST";
  const [at, data] = [url(path, query), body === undefined ? undefined : JSON.stringify(body)];
  let answer;
  try {
    answer = await fetch(at, { method, headers: headers(body), body: data, signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, "no_answer", "The gateway gave no answer.");
  }
  if (answer.status === 204) return;
  if (!answer.ok) throw await refusal(answer, path);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const block = buffer.slice(0, end);
        buffer = buffer.slice(end + 2);
        const parsed = parse(block);
        if (parsed) yield parsed;
      }
    }
  } catch (error) {
    if (signal?.aborted) return;
    throw new Refused(0, "cut", "The stream was cut.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { event: "message", data: "", comment: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith(":")) event.comment += line.slice(1).trim();
    else if (line.startsWith("event:")) event.event = line.slice(6).trim();
    else if (line.startsWith("data:")) event.data += line.slice(5).trim();
  }
  return event.data || event.comment ? event : null;
}
