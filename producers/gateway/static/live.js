// The overview and the fleet, as the gateway sends them to all who look: every two seconds, from one reading.
//
//   /v1/overview/events ─ follow ─▶ sent ─▶ latest, of pages that show them; which ask, where no stream is to be had

// While events come a page asks for the rest alone, and seldom.
const LIVE_MS = 6000;
const ASK_MS = 2000;
const AGAIN_MS = 3000;
let sent = null; // {now, fleet, at, signal}, the signal of whoever followed
const live = () => sent !== null && performance.now() - sent.at < LIVE_MS;

export const every = () => (live() ? LIVE_MS : ASK_MS);

// {now, fleet}, as they were sent, or asked for.
export async function latest(api, signal) {
  if (live()) return sent;
  const [now, fleet] = await Promise.all([api.get("v1/overview", null, signal), api.get("v1/fleet", { max_age: 2 }, signal)]);
  return { now, fleet };
}

// Until the page is left or hidden.
export async function follow({ api, refresh }, signal) {
  try {
    while (!signal.aborted) {
      let now = null;
      try {
        for await (const { event, data } of api.events("v1/overview/events", { signal })) {
          if (event === "overview") now = JSON.parse(data);
          else if (event === "fleet" && now) {
            sent = { now, fleet: JSON.parse(data), at: performance.now(), signal };
            refresh();
          }
        }
      } catch (error) {
        // An older gateway, or no room for a stream: the page asks.
        if (signal.aborted || [401, 403, 404, 429].includes(error.status)) return;
      }
      if (signal.aborted) return;
      sent = null;
      refresh();
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  } finally {
    if (sent?.signal === signal) sent = null; // and not what the next page follows
  }
}
