// The `openai` client for Node against a running daemon: node node_client.mjs URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const ai = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is a layer range?" }];
const ask = { model, messages, temperature: 0, max_tokens: 40 };

const listed = [];
for await (const found of ai.models.list()) listed.push(found.id);
assert(listed.includes(model));

const whole = await ai.chat.completions.create(ask);
const stream = await ai.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
let text = "";
let usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
// What was cached or guessed may differ from one request to the next.
assert.equal(usage.total_tokens, whole.usage.total_tokens);

const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] },
  },
};
const forced = await ai.chat.completions.create({ ...ask, tools: [tool], tool_choice: "required", max_tokens: 200, parallel_tool_calls: false });
assert.equal(typeof JSON.parse(forced.choices[0].message.tool_calls[0].function.arguments).city, "string");

const response = await ai.responses.create({ model, input: messages[0].content, temperature: 0 });
assert(response.output_text.startsWith(text.slice(0, 10)));
let told = "";
for await (const event of await ai.responses.create({ model, input: messages[0].content, temperature: 0, stream: true })) {
  if (event.type === "response.output_text.delta") told += event.delta;
}
assert.equal(told, response.output_text);

const vectors = await ai.embeddings.create({ model, input: ["one", "two"] });
assert.equal(vectors.data.length, 2);
const length = Math.hypot(...vectors.data[0].embedding);
assert(Math.abs(length - 1) < 1e-4, `length ${length}`);

const completed = await ai.completions.create({ model, prompt: "A layer range is", max_tokens: 5 });
assert(completed.choices[0].text);

await assert.rejects(ai.chat.completions.create({ ...ask, model: "gpt-9" }), OpenAI.NotFoundError);
await assert.rejects(ai.chat.completions.create({ ...ask, temperature: 9 }), (error) => error.param === "temperature");
const abandoned = await ai.chat.completions.create({ ...ask, stream: true, max_tokens: 1500, ignore_eos: true });
for await (const chunk of abandoned) if (chunk.choices[0].delta.content) break;

console.log("node client: all right");
