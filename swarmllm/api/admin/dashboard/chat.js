// A conversation, and under each answer the way it took; and the conversations that the browser keeps.

import { gallery, intake, readFiles } from "./attachments.js";
import { asJson, asMarkdown, copy, download, erase, isAnswer, matching, messagesOf, readAll, title, write } from "./conversations.js";
import { h, show } from "./dom.js";
import { clock, layerText, ms, plural, rate } from "./format.js";
import { call, pieces } from "./link.js";
import { markdown } from "./markdown.js";
import { hops, timeBar } from "./routes.js";

let conversation = begin();
let running = null;
let names = null;
let takenBy = new Map(); // by the name of a model, the kinds of files that it takes
let attachments = []; // of the next question
let kept = null; // by id; null until they are read
let search = "";
let editing = null; // the question's place
let copied = null; // the turn's place
let stayed = null; // { reply, message }: an answer that stayed because the new one failed
let trouble = "";

const SAMPLING = [ // name, label, bounds
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }], ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Longest answer, tokens", { min: 1, step: 1 }], ["seed", "Seed", { min: 0, step: 1 }],
];

/** `model` is the model that is asked. It is `fixed` once the person chose it or asked it: then only the person changes it. */
function begin(model = null, fixed = false) {
  return { id: identifier(), turns: [], model, fixed, refused: false, system: "", sampling: {}, changed: Date.now() };
}

// crypto.randomUUID is only there for pages by https or from this machine.
function identifier() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function read(again) {
  kept = new Map();
  try {
    for (const each of await readAll()) {
      if (kept.has(each.id)) continue;
      const last = each.turns.at(-1);
      for (const turn of each.turns) {
        if (turn.pictures) turn.attachments = turn.pictures.map((picture) => ({ kind: "picture", ...picture }));
        delete turn.pictures;
      }
      if (last?.role === "assistant" && !last.content && !last.error && !last.stopped && !last.swarm) last.error = "The page was closed before the answer came.";
      kept.set(each.id, { ...each, refused: false });
    }
  } catch { trouble = "This browser keeps no conversations: they are gone when the page is closed.";
  }
  again();
}

/** Write it down, unless nothing was asked yet or somebody deleted it. */
function keep(own, again) {
  if (!own.turns.length || own.deleted) return;
  own.changed = Date.now();
  kept?.set(own.id, own);
  const { refused, ...record } = own;
  write(record).catch(() => { trouble = "The browser could not keep this conversation."; again(); });
}

function open(own, again) {
  running?.abort();
  conversation = own;
  editing = copied = stayed = null;
  attachments = [];
  again();
}

function remove(own, again) {
  own.deleted = true;
  kept.delete(own.id);
  erase(own.id).catch(() => { trouble = "The browser could not delete this conversation."; again(); });
  if (own === conversation) open(begin(own.model, own.fixed), again);
  else again();
}

/** The models that can answer: from the event stream, or asked for where the key may not read that. */
async function refresh(root, state) {
  const models = (await (await call("GET", "v1/models")).json()).data;
  names = models.filter((model) => model.ready).map((model) => model.id);
  takenBy = new Map(models.map((model) => [model.id, [["picture", "image"], ["sound", "audio"]].filter(([, modality]) => model.architecture.input_modalities.includes(modality)).map(([kind]) => kind)]));
  renderChat(root, state);
}

export function renderChat(root, state) {
  if (state.models) {
    names = state.models.models.filter((model) => model.complete).map((model) => model.name);
    takenBy = new Map(state.models.models.map((model) => [model.name, model.takes]));
  } else if (names === null && state.link.status === "limited") { names = []; refresh(root, state).catch(() => {}); }
  const ready = names || [];
  if (!conversation.fixed && !ready.includes(conversation.model)) conversation.model = ready[0] || null;
  const { turns, model } = conversation;
  const isAvailable = ready.includes(model);
  if (isAvailable) conversation.refused = false;
  const choose = (event) => {
    if (event.target.value === conversation.model) return;
    Object.assign(conversation, { model: event.target.value, fixed: true, refused: false });
    keep(conversation, again);
    again();
  };
  const again = () => renderChat(root, state);
  if (kept === null) read(again);
  const kinds = takenBy.get(model) || [];
  const add = async (files) => {
    trouble = "";
    try { attachments.push(...await readFiles(files, kinds)); } catch (error) { trouble = error.message; }
    again();
  };
  const takes = kinds.length ? intake(add, kinds) : {};
  const log = root.querySelector(".log");
  const atEnd = !log || log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  show(root,
    h("div", { class: "tools", "data-key": "tools" }, history(again), settings(again)),
    trouble && h("p", { class: "small bad", "data-key": "trouble", role: "status" }, trouble),
    h("div", { class: "log", "data-key": "log", role: "log", "aria-label": "Conversation", tabindex: "0" }, turns.length ? turns.map((each, index) => turn(each, index, root, state)) : intro(ready, state)),
    !ready.length && turns.length > 0 && h("p", { class: "small bad", "data-key": "nobody", role: "status" }, nobody(state), " ", h("a", { href: "#models" }, "Models")),
    h("form", { class: "composer", "data-key": "composer", ...takes.drop, onsubmit: (event) => { event.preventDefault(); send(root, state); } },
      attachments.length > 0 && gallery(attachments, (index) => { attachments.splice(index, 1); again(); }),
      h("label", { class: "sr", "data-key": "prompt-label", for: "prompt" }, "Message"),
      h("textarea", { id: "prompt", "data-key": "prompt", ...takes.paste, rows: "2", placeholder: model ? `Ask ${model} something` : "No model is ready", onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(root, state); }
      } }),
      h("div", { class: "row between", "data-key": "row" },
        h("div", { class: "row" },
          h("label", { class: "sr", for: "model" }, "Model"),
          h("select", { id: "model", disabled: !model, value: model, oninput: choose, onchange: choose },
            (model && !isAvailable ? [model, ...ready] : ready).map((name) => h("option", { value: name, "data-key": name }, ready.includes(name) ? name : `${name} (unavailable)`))),
          turns.length > 0 && h("button", { type: "button", class: "quiet", onclick: () => open(begin(model, conversation.fixed), again) }, "New conversation"), takes.button),
        running ? h("button", { type: "button", "data-key": "stop", onclick: () => running?.abort() }, "Stop")
          : h("button", { type: "submit", class: "primary", "data-key": "send", disabled: !model }, "Send"))),
    model && !isAvailable && h("p", { class: "small bad", "data-key": conversation.refused ? "refused" : "unavailable", role: conversation.refused ? "alert" : "status" },
      `${conversation.refused ? "Not sent: " : ""}${model} is not available now. Wait until it is back, or choose another model.`),
    h("div", { class: "sr", role: "status" }, running ? "The model is answering." : turns.at(-1)?.stopped ? "The answer was stopped." : turns.at(-1)?.swarm ? "The answer is complete." : ""));
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

/** The conversations that are kept: found by their words, opened, deleted. */
function history(again) {
  const all = [...(kept?.values() || [])];
  const found = matching(all, search);
  return h("details", { class: "kept", "data-key": "kept" },
    h("summary", null, `Conversations (${all.length})`),
    h("label", { class: "sr", for: "search" }, "Search conversations"),
    h("input", { id: "search", type: "search", autocomplete: "off", placeholder: "Search", oninput: (event) => { search = event.target.value; again(); } }),
    found.length ? h("ul", null, found.map((each) => h("li", { "data-key": each.id },
      h("button", { type: "button", class: "plain cut grow", ...(each.id === conversation.id ? { "aria-current": "true" } : {}), onclick: () => open(each, again) }, title(each)),
      h("span", { class: "muted small when" }, `${new Date(each.changed).toLocaleDateString()} ${clock(each.changed / 1000)}`),
      h("button", { type: "button", class: "plain", "aria-label": `Delete ${title(each)}`, onclick: () => remove(each, again) }, "Delete"))))
      : h("p", { class: "muted small" }, all.length ? "None has these words." : "None yet. They stay in this browser."));
}

/** What this conversation is asked with, and ways to take it along. */
function settings(again) {
  const own = conversation;
  const name = () => `conversation-${new Date(own.changed).toISOString().slice(0, 10)}-${own.id.slice(0, 6)}`;
  const set = (key) => (event) => {
    const { value, validity } = event.target;
    if (!validity.valid) return;
    if (value === "") delete own.sampling[key];
    else own.sampling[key] = Number(value);
    keep(own, again);
  };
  return h("details", { class: "settings", "data-key": "settings" },
    h("summary", null, "Settings"),
    h("div", { class: "fields", "data-key": own.id },
      h("label", { for: "system" }, "System prompt"),
      h("textarea", { id: "system", rows: "2", onchange: () => keep(own, again), oninput: (event) => { own.system = event.target.value; } }, own.system),
      h("div", { class: "row" }, SAMPLING.map(([key, label, bounds]) => h("label", { "data-key": key }, label,
        h("input", { type: "number", name: key, placeholder: "default", ...bounds, value: own.sampling[key], onchange: set(key) }))))),
    h("div", { class: "row" },
      h("button", { type: "button", disabled: !own.turns.length, onclick: () => download(`${name()}.md`, "text/markdown", asMarkdown(own)) }, "Export Markdown"),
      h("button", { type: "button", disabled: !own.turns.length, onclick: () => download(`${name()}.json`, "application/json", asJson(own)) }, "Export JSON")));
}

function turn(each, index, root, state) {
  const again = () => renderChat(root, state);
  const { turns } = conversation;
  const isUser = each.role === "user";
  if (editing === index) return editor(each, index, root, state);
  const onCopy = async () => { copied = await copy(each.content) ? index : null; again(); };
  const isLast = index === turns.length - 1;
  return h("article", { class: `turn ${each.role}`, "data-key": `turn-${conversation.id}-${index}`, "aria-label": isUser ? "You" : "Answer" },
    each.thought && h("details", { class: "thought", "data-key": "thought" }, h("summary", null, each.content || each.swarm ? "Thoughts" : "Thinking…"), h("div", { class: "text" }, each.thought)),
    each.attachments && gallery(each.attachments),
    (each.content || (running && isLast)) && h("div", { class: "text" }, isUser ? each.content : markdown(each.content)),
    each.stopped && h("p", { class: "muted small" }, "Stopped."),
    stayed?.reply === each && h("p", { class: "bad", role: "alert" }, `There is no new answer: ${stayed.message}`),
    each.error && h("p", { class: "bad", role: "alert" }, each.error),
    each.swarm && way(each),
    !(running && isLast) && h("div", { class: "row acts", "data-key": "acts" },
      each.content && h("button", { type: "button", class: "plain", "data-key": "copy", "aria-label": isUser ? "Copy the question" : "Copy the answer", onclick: onCopy }, copied === index ? "Copied" : "Copy"),
      isUser && !running && h("button", { type: "button", class: "plain", "data-key": "edit", "aria-label": "Edit the question in a new conversation", onclick: () => { editing = index; again(); root.querySelector("#edit").focus(); } }, "Edit"),
      !isUser && isLast && !running && h("button", { type: "button", class: "plain", "data-key": "again", onclick: () => regenerate(root, state) }, "Regenerate")));
}

/** A question while it is edited. What is asked then begins a conversation of its own, and this one stays as it is. */
function editor(each, index, root, state) {
  const again = () => renderChat(root, state);
  const branch = (event) => {
    event.preventDefault();
    const text = root.querySelector("#edit").value.trim();
    if (!text || running || !isReady(again)) return;
    const { model, system, sampling, turns } = conversation;
    open({ ...begin(model, true), system, sampling: { ...sampling }, turns: structuredClone(turns.slice(0, index)) }, again);
    ask(text, root, state, each.attachments);
  };
  return h("form", { class: "composer", "data-key": `edit-${conversation.id}-${index}`, onsubmit: branch },
    h("label", { class: "sr", for: "edit" }, "Question"),
    h("textarea", { id: "edit", rows: "3" }, each.content),
    h("div", { class: "row end" },
      h("button", { type: "button", class: "plain", onclick: () => { editing = null; again(); } }, "Cancel"),
      h("button", { type: "submit", class: "primary" }, "Ask in a new conversation")));
}

function regenerate(root, state) {
  if (running || !isReady(() => renderChat(root, state))) return;
  generate(root, state, conversation.turns.pop());
}

/** Whether the conversation's model can answer; where it cannot, the page says so. */
function isReady(again) {
  if (names?.includes(conversation.model)) return true;
  conversation.refused = true;
  again();
  return false;
}

function way({ swarm, finish, tokens }) {
  const nodes = new Set(swarm.route.map((stage) => stage.node)).size;
  const facts = [
    tokens && plural(tokens, "token"), swarm.decode_tokens_per_s && `${rate(swarm.decode_tokens_per_s)} tokens/s`, `prefill ${ms(swarm.prefill_ms)}`,
    swarm.queue_ms > 1 && `waited ${ms(swarm.queue_ms)}`, swarm.shape === "local" ? "local, on one node" : plural(nodes, "node"), swarm.exact === false && "rounded between nodes: not exactly the uncut model's text", finish === "length" && "cut off at the limit",
  ];
  return h("div", { class: "way" }, hops(swarm.route, { pictures: swarm.pictures, sounds: swarm.sounds }), timeBar(swarm.route), h("div", { class: "muted small" }, facts.filter(Boolean).join(" · ")));
}

function send(root, state) {
  const box = root.querySelector("#prompt");
  const text = box.value.trim();
  if (!text || running || !conversation.model || !isReady(() => renderChat(root, state))) return;
  box.value = "";
  ask(text, root, state, attachments.splice(0));
}

function ask(text, root, state, given = []) {
  conversation.fixed = true;
  conversation.turns.push({ role: "user", content: text, ...(given.length ? { attachments: given } : {}) });
  generate(root, state);
}

/** Answer the last question of the conversation that is shown; another one may be shown before the answer ends.
 * Where no new answer comes, the one `before` stays. */
async function generate(root, state, before = null) {
  const own = conversation;
  const again = () => renderChat(root, state);
  const reply = { role: "assistant", content: "" };
  const isKept = isAnswer(before);
  own.turns.push(reply);
  editing = copied = stayed = null;
  running = new AbortController();
  if (!isKept) keep(own, again);
  again();
  try {
    const body = { model: own.model, ...own.sampling, messages: messagesOf(own.system, own.turns), stream: true, stream_options: { include_usage: true } };
    const stream = await call("POST", "v1/chat/completions", body, running.signal);
    for await (const event of pieces(stream, "\n\n")) {
      if (!event.startsWith("data: {")) continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (chunk.usage) reply.tokens = chunk.usage.completion_tokens;
      if (choice?.delta?.reasoning_content) reply.thought = (reply.thought || "") + choice.delta.reasoning_content;
      if (choice?.delta?.content) reply.content += choice.delta.content;
      if (choice?.finish_reason) { reply.finish = choice.finish_reason; reply.swarm = chunk.swarm; }
      again();
    }
  } catch (error) {
    if (error.name === "AbortError") reply.stopped = true;
    else reply.error = error.message;
    if (isKept && !isAnswer(reply)) {
      own.turns.splice(-1, 1, before);
      if (reply.error) stayed = { reply: before, message: reply.error };
    }
  } finally {
    running = null;
    keep(own, again);
    again();
    if (document.activeElement === document.body) root.querySelector("#prompt").focus();
  }
}
