// Vercel's AI SDK with its provider for OpenAI, against the gateway named by the first argument. The second names the
// endpoint (`responses` or `chat`), the third lists what is tried; what came is printed as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, isStepCount, Output, streamObject, streamText, tool, ToolLoopAgent } from "ai";
import { z } from "zod";

const [url, endpoint, tried] = process.argv.slice(2);
const model = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })[endpoint]("tiny");
const usual = { model, temperature: 0, maxOutputTokens: 120, maxRetries: 0 };
const prompt = "Will it rain in Bern?";
let calls = [];
const tools = {
  weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Bern", "Oslo"]), days: z.number().int().min(1).max(9) }),
    execute: async (place) => {
      calls.push(place);
      return { rain: true };
    },
  }),
};
// The bundled model would not call by itself: the first step has to call, the second has to answer.
const loop = {
  ...usual,
  tools,
  stopWhen: isStepCount(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  providerOptions: { openai: { parallelToolCalls: false } },
};
const stepsOf = (steps) => steps.map((step) => [step.finishReason, step.toolCalls.length, step.toolResults.length]);
const person = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });

const trials = {
  loop: async () => {
    const { text, steps, usage } = await generateText({ ...loop, prompt });
    return { text, steps: stepsOf(steps), tokens: usage.outputTokens };
  },
  streamed: async () => {
    const result = streamText({ ...loop, prompt });
    const kinds = [];
    let text = "";
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      kinds.push(part.type);
    }
    return { text: await result.text, steps: stepsOf(await result.steps), kinds };
  },
  agent: async () => {
    const { text, steps } = await new ToolLoopAgent({ ...loop, instructions: "Be brief." }).generate({ prompt });
    return { text, steps: stepsOf(steps) };
  },
  history: async () => {
    // What the first turn said goes into the second, as an application keeps it.
    const first = await generateText({ ...loop, prompt });
    const messages = [{ role: "user", content: prompt }, ...first.response.messages, { role: "user", content: "Sure?" }];
    const { text, steps } = await generateText({ ...loop, messages });
    return { text, steps: stepsOf(steps) };
  },
  object: async () => ({ output: (await generateObject({ ...usual, schema: person, prompt: "Who wrote it?" })).object }),
  objectStreamed: async () => {
    const result = streamObject({ ...usual, schema: person, prompt: "Who wrote it?" });
    let pieces = 0;
    for await (const _ of result.partialObjectStream) pieces += 1;
    return { pieces, output: await result.object };
  },
  output: async () => ({
    output: (await generateText({ ...usual, output: Output.object({ schema: person }), prompt: "Who?" })).output,
  }),
  // An answer of a schema beside tools: a call, then JSON.
  outputWithTools: async () => {
    const { output, steps } = await generateText({ ...loop, output: Output.object({ schema: person }), prompt });
    return { output, steps: stepsOf(steps) };
  },
  choice: async () => ({
    output: (await generateText({ ...usual, output: Output.choice({ options: ["rain", "sun"] }), prompt })).output,
  }),
};
const told = {};
for (const name of tried.split(",")) {
  calls = [];
  told[name] = { ...(await trials[name]()), calls };
}
console.log(JSON.stringify(told));
