// Streams a background response through the death of its gateway: a line of JSON for each event, and one at each return.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 20 });
const asked = { model: "tiny", input: "Write a long program.", max_output_tokens: 900, seed: 1, ignore_eos: true };
let stream = await client.responses.create({ ...asked, background: true, stream: true });
let id;
let last = -1;
let ended = false;
while (!ended) {
  try {
    for await (const event of stream) {
      id ??= event.response.id;
      last = event.sequence_number;
      console.log(JSON.stringify([event.type, last, event.delta ?? ""]));
      ended = ["response.completed", "response.incomplete", "response.failed"].includes(event.type);
    }
  } catch (error) {
    console.log(JSON.stringify(["broken", last, error.constructor.name]));
  }
  if (!ended) stream = await client.responses.retrieve(id, { stream: true, starting_after: last });
}
console.log(JSON.stringify(["id", last, id]));
