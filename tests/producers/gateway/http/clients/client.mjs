// Sends Node's own requests, fetch (undici) and http: node client.mjs http://127.0.0.1:8000 MODEL.
import http from "node:http";

const [url, model] = process.argv.slice(2);
const body = JSON.stringify({ model, prompt: "def f" });
const headers = { "content-type": "application/json" };
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });

const plain = await fetch(`${url}/v1/tasks`, { method: "POST", headers, body });
console.log(plain.status);
const chunked = await fetch(`${url}/v1/tasks`, { method: "POST", headers, body: new Blob([body]).stream(), duplex: "half" });
console.log(chunked.status);
for (const length of [{ "content-length": body.length }, { "transfer-encoding": "chunked" }]) {
  const offer = { connection: "Upgrade", upgrade: "h2c" };
  console.log(
    await new Promise((resolve, reject) => {
      const request = http.request(`${url}/v1/tasks`, { method: "POST", agent, headers: { ...headers, ...offer, ...length } });
      request.on("response", (answer) => answer.resume().on("end", () => resolve(answer.statusCode)));
      request.on("error", reject);
      request.write(body.slice(0, 5));
      setTimeout(() => request.end(body.slice(5)), 20); // in a segment of its own
    }),
  );
}
agent.destroy();
