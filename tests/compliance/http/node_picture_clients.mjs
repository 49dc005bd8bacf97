// The clients of three APIs for Node show a picture to a model that several nodes run:
// node node_picture_clients.mjs URL MODEL PICTURE (a PNG)
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [url, model, path] = process.argv.slice(2);
const data = readFileSync(path).toString("base64");
const image = `data:image/png;base64,${data}`;
const question = "What is this?";

const ai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const content = [{ type: "image_url", image_url: { url: image } }, { type: "text", text: question }];
const ask = { model, messages: [{ role: "user", content }], temperature: 0, max_tokens: 12 };
const whole = await ai.chat.completions.create(ask);
const expected = whole.choices[0].message.content;
const blind = await ai.chat.completions.create({ ...ask, messages: [{ role: "user", content: question }] });
assert(whole.usage.prompt_tokens > blind.usage.prompt_tokens);
let text = "";
for await (const chunk of await ai.chat.completions.create({ ...ask, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, expected);

const items = [{ type: "input_image", image_url: image, detail: "auto" }, { type: "input_text", text: question }];
const input = [{ role: "user", content: items }];
const response = await ai.responses.create({ model, input, temperature: 0, max_output_tokens: 12 });
assert.equal(response.output_text, expected);

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const source = { type: "base64", media_type: "image/png", data };
const blocks = [{ type: "image", source }, { type: "text", text: question }];
const messages = [{ role: "user", content: blocks }];
const message = await anthropic.messages.create({ model, max_tokens: 12, temperature: 0, messages });
assert.equal(message.content[0].text, expected);
assert((await anthropic.messages.countTokens({ model, messages })).input_tokens > 0);

const ollama = new Ollama({ host: url });
const options = { temperature: 0, num_predict: 12 };
const turn = { role: "user", content: question, images: [data] };
const chat = await ollama.chat({ model, messages: [turn], options });
assert.equal(chat.message.content, expected);
const generated = await ollama.generate({ model, prompt: question, images: [data], options });
assert.equal(generated.response, expected);

const drawing = `data:image/png;base64,${Buffer.from("<svg/>").toString("base64")}`;
const wrong = [{ role: "user", content: [{ type: "image_url", image_url: { url: drawing } }] }];
await assert.rejects(ai.chat.completions.create({ ...ask, messages: wrong }), OpenAI.BadRequestError);

console.log("node clients: all right");
