// Every call of OpenAI's JavaScript client against the gateway named by the first argument; what came is printed as JSON.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0, timeout: 180_000 });
const model = "tiny";
const messages = [{ role: "user", content: "Write the function add(a, b)." }];
const said = {};

const refused = async (call) => {
  try {
    await call();
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
};

said.models = [(await client.models.list()).data[0].id, (await client.models.retrieve(model)).id];

const chat = { model, messages, max_completion_tokens: 12, seed: 1 };
said.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
said.chatStream = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  said.chatStream += chunk.choices[0]?.delta?.content ?? "";
}
said.chatFinal = await client.chat.completions.stream(chat).finalContent();

const text = { model, prompt: "def read(path):", max_tokens: 12, seed: 1 };
const whole = await client.completions.create({ ...text, n: 2, logprobs: 1 });
said.completions = whole.choices.map((choice) => [choice.text, choice.logprobs.tokens.length]);
said.completionStream = "";
for await (const chunk of await client.completions.create({ ...text, stream: true, stream_options: { include_usage: true } })) {
  said.completionStream += chunk.choices[0]?.text ?? "";
  said.usage = chunk.usage ?? said.usage;
}

const asked = { model, input: "Write the function add(a, b).", max_output_tokens: 12, seed: 1 };
const response = await client.responses.create({ ...asked, metadata: { order: "7" } });
said.response = [response.output_text, response.usage.output_tokens, response.metadata.order];
said.retrieved = (await client.responses.retrieve(response.id)).output_text;
said.items = (await client.responses.inputItems.list(response.id)).data.map((item) => item.content[0].text);
said.responseStream = [];
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  said.responseStream.push([event.type, event.sequence_number, event.delta ?? null]);
}
said.responseFinal = (await client.responses.stream(asked).finalResponse()).output_text;
const next = await client.responses.create({ ...asked, previous_response_id: response.id });
said.conversation = (await client.responses.inputItems.list(next.id)).data.length;
said.deleted = (await client.responses.delete(response.id)) ?? null;
said.gone = await refused(() => client.responses.retrieve(response.id));

let background = await client.responses.create({ ...asked, background: true });
said.background = [background.status];
while (["queued", "in_progress"].includes(background.status)) {
  await new Promise((resolve) => setTimeout(resolve, 50));
  background = await client.responses.retrieve(background.id);
}
said.background.push(background.status, background.output_text);
const long = { ...asked, max_output_tokens: 900, background: true, ignore_eos: true };
said.cancelled = (await client.responses.cancel((await client.responses.create(long)).id)).status;

const file = await client.files.create({ file: await toFile(Buffer.from("{}\n"), "in.jsonl"), purpose: "batch" });
said.file = [file.bytes, await (await client.files.content(file.id)).text(), (await client.files.list()).data[0].id === file.id];
const batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
const [same] = (await client.batches.list({ limit: 1 })).data;
said.batch = [batch.status, same.id === (await client.batches.retrieve(batch.id)).id, (await client.batches.cancel(batch.id)).status];
said.fileDeleted = (await client.files.delete(file.id)).deleted;

const hook = await client.webhooks.create({ name: "js", url: "https://1.1.1.1/", event_types: ["response.completed"] });
said.hook = [hook.signing_secret.slice(0, 6), (await client.webhooks.update(hook.id, { name: "other" })).name];
said.hooks = (await client.webhooks.list()).data.map((one) => one.id === hook.id);
said.rotated = (await client.webhooks.rotateSecret(hook.id)).signing_secret !== hook.signing_secret;
said.hookDeleted = (await client.webhooks.delete(hook.id)).deleted;

said.unknownModel = await refused(() => client.chat.completions.create({ ...chat, model: "none" }));
said.badValue = await refused(() => client.completions.create({ ...text, temperature: -1 }));
said.notOffered = await refused(() => client.responses.create({ ...asked, tools: [{ type: "web_search" }] }));

const left = await client.completions.create({ ...text, max_tokens: 900, stream: true, ignore_eos: true });
for await (const chunk of left) {
  said.left = chunk.id;
  break; // the client aborts the request
}
console.log(JSON.stringify(said));
