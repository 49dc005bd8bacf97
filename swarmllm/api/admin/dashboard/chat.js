// A conversation, and under each answer the way it took.

import { h, show } from "./dom.js";
import { layerText, ms, plural, rate } from "./format.js";
import { call, pieces } from "./link.js";
import { markdown } from "./markdown.js";
import { hops, timeBar } from "./routes.js";

let conversation = begin();
let running = null;
let names = null;

/** `model` is the model that is asked. It is `fixed` once the person chose it or asked it: then only the person changes it. */
function begin(model = null, fixed = false) {
  return { turns: [], model, fixed, refused: false };
}

/** The models that can answer: from the event stream, or asked for where the key may not read that. */
async function refresh(root, state) {
  const models = (await (await call("GET", "v1/models")).json()).data;
  names = models.filter((model) => model.ready).map((model) => model.id);
  renderChat(root, state);
}

export function renderChat(root, state) {
  if (state.models) names = state.models.models.filter((model) => model.complete).map((model) => model.name);
  else if (names === null && state.link.status === "limited") { names = []; refresh(root, state).catch(() => {}); }
  const ready = names || [];
  if (!conversation.fixed && !ready.includes(conversation.model)) conversation.model = ready[0] || null;
  const { turns, model } = conversation;
  const isAvailable = ready.includes(model);
  if (isAvailable) conversation.refused = false;
  const choose = (event) => {
    if (event.target.value === conversation.model) return;
    Object.assign(conversation, { model: event.target.value, fixed: true, refused: false });
    again();
  };
  const again = () => renderChat(root, state);
  const log = root.querySelector(".log");
  const atEnd = !log || log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  show(root,
    h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" }, turns.length ? turns.map(turn) : intro(ready, state)),
    !ready.length && turns.length > 0 && h("p", { class: "small bad", "data-key": "nobody", role: "status" }, nobody(state), " ", h("a", { href: "#models" }, "Models")),
    h("form", { class: "composer", "data-key": "composer", onsubmit: (event) => { event.preventDefault(); send(root, state); } },
      h("label", { class: "sr", for: "prompt" }, "Message"),
      h("textarea", { id: "prompt", rows: "2", placeholder: model ? `Ask ${model} something` : "No model is ready", onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(root, state); }
      } }),
      h("div", { class: "row between" },
        h("div", { class: "row" },
          h("label", { class: "sr", for: "model" }, "Model"),
          h("select", { id: "model", disabled: !model, value: model, oninput: choose, onchange: choose },
            (model && !isAvailable ? [model, ...ready] : ready).map((name) => h("option", { value: name, "data-key": name }, ready.includes(name) ? name : `${name} (unavailable)`))),
          turns.length > 0 && h("button", { type: "button", class: "quiet", onclick: () => { running?.abort(); conversation = begin(model, conversation.fixed); again(); } }, "New conversation")),
        running ? h("button", { type: "button", "data-key": "stop", onclick: () => running?.abort() }, "Stop")
          : h("button", { type: "submit", class: "primary", "data-key": "send", disabled: !model }, "Send"))),
    model && !isAvailable && h("p", { class: "small bad", "data-key": conversation.refused ? "refused" : "unavailable", role: conversation.refused ? "alert" : "status" },
      `${conversation.refused ? "Not sent: " : ""}${model} is not available now. Wait until it is back, or choose another model.`),
    h("div", { class: "sr", role: "status" }, running ? "The model is answering." : turns.at(-1)?.swarm ? "The answer is complete." : ""));
  if (atEnd) { const now = root.querySelector(".log"); now.scrollTop = now.scrollHeight; }
}

function intro(ready, state) {
  return h("div", { class: "empty", style: { margin: "auto" } }, ready.length
    ? "Ask something. Under each answer stands the way it took through the swarm."
    : [nobody(state), " Load what is missing under ", h("a", { href: "#models" }, "Models"), "."]);
}

/** Why nothing can be asked. */
function nobody(state) {
  const cut = state.models?.models.find((model) => model.holders.length && model.missing.length);
  return cut ? `No model can answer now: of ${cut.name}, layers ${cut.missing.map(layerText).join(", ")} are missing.` : "No model is complete in the swarm yet.";
}

function turn(each, index) {
  return h("article", { class: `turn ${each.role}`, "data-key": `turn-${index}`, "aria-label": each.role === "user" ? "You" : "Answer" },
    each.thought && h("details", { class: "thought", "data-key": "thought" }, h("summary", null, each.content || each.swarm ? "Thoughts" : "Thinking…"), h("div", { class: "text" }, each.thought)),
    h("div", { class: "text" }, each.role === "user" ? each.content : markdown(each.content)),
    each.error && h("p", { class: "bad", role: "alert" }, each.error),
    each.swarm && way(each));
}

function way({ swarm, finish, tokens }) {
  const nodes = new Set(swarm.route.map((stage) => stage.node)).size;
  const facts = [
    tokens && plural(tokens, "token"), swarm.decode_tokens_per_s && `${rate(swarm.decode_tokens_per_s)} tokens/s`, `prefill ${ms(swarm.prefill_ms)}`,
    swarm.queue_ms > 1 && `waited ${ms(swarm.queue_ms)}`, swarm.shape === "local" ? "local, on one node" : plural(nodes, "node"), swarm.exact === false && "rounded between nodes: not exactly the uncut model's text", finish === "length" && "cut off at the limit", finish === "stopped" && "stopped",
  ];
  return h("div", { class: "way" }, hops(swarm.route), timeBar(swarm.route), h("div", { class: "muted small" }, facts.filter(Boolean).join(" · ")));
}

async function send(root, state) {
  const box = root.querySelector("#prompt");
  const text = box.value.trim();
  const { turns, model } = conversation;
  const again = () => renderChat(root, state);
  if (!text || running || !model) return;
  if (!names?.includes(model)) { conversation.refused = true; again(); return; }
  conversation.fixed = true;
  box.value = "";
  const answer = { role: "assistant", content: "" };
  const messages = turns.filter((each) => each.content && !each.error).map(({ role, content }) => ({ role, content }));
  turns.push({ role: "user", content: text }, answer);
  running = new AbortController();
  again();
  try {
    const body = { model, messages: [...messages, { role: "user", content: text }], stream: true, stream_options: { include_usage: true } };
    const reply = await call("POST", "v1/chat/completions", body, running.signal);
    for await (const event of pieces(reply, "\n\n")) {
      if (!event.startsWith("data: {")) continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
      if (choice?.delta?.reasoning_content) answer.thought = (answer.thought || "") + choice.delta.reasoning_content;
      if (choice?.delta?.content) answer.content += choice.delta.content;
      if (choice?.finish_reason) { answer.finish = choice.finish_reason; answer.swarm = chunk.swarm; }
      again();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.content += answer.content ? " …" : "(stopped)";
    else answer.error = error.message;
  } finally {
    running = null;
    again();
    box.focus();
  }
}
