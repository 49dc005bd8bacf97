// The conversations that this browser keeps, in IndexedDB: read once, written as they change, found by their words, exported.
import { asPart } from "./attachments.js";

const STORE = "conversations";
const database = new Promise((resolve, reject) => {
  if (typeof indexedDB === "undefined") { reject(new Error("This browser has no IndexedDB")); return; }
  const opening = indexedDB.open("swarmllm", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
  opening.onsuccess = () => resolve(opening.result);
  opening.onerror = () => reject(opening.error);
});
database.catch(() => {}); // Each use tells its caller.

async function inStore(mode, action) {
  const transaction = (await database).transaction(STORE, mode);
  const request = action(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const readAll = () => inStore("readonly", (store) => store.getAll());
export const write = (conversation) => inStore("readwrite", (store) => store.put(conversation));
export const erase = (id) => inStore("readwrite", (store) => store.delete(id));

/** A conversation's first question, in one line. */
export function title({ turns }) {
  const first = (turns[0]?.content || "").replace(/\s+/g, " ").trim();
  return first.length > 80 ? `${first.slice(0, 79)}…` : first || "Empty conversation";
}

/** Those that have all words of `search`, latest first. */
export function matching(conversations, search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const hasAll = (each) => {
    const text = [each.model, each.system, ...each.turns.map((turn) => turn.content)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  return conversations.filter(hasAll).sort((a, b) => b.changed - a.changed);
}

export function asMarkdown(conversation) {
  const parts = [`# ${title(conversation)}`, `Model: ${conversation.model}`];
  if (conversation.system) parts.push("## System", conversation.system);
  for (const { role, content, error, attachments } of conversation.turns) {
    parts.push(role === "user" ? "## You" : "## Answer", ...(attachments || []).map(({ kind, name }) => `(${kind}: ${name})`), error ? `${content}\n\n(${error})`.trim() : content);
  }
  return `${parts.join("\n\n")}\n`;
}

/** The messages as an OpenAI client sends them, and what they were asked with. */
export function asJson(conversation) {
  const { model, system, sampling, turns } = conversation;
  return `${JSON.stringify({ model, ...sampling, messages: messagesOf(system, turns) }, null, 2)}\n`;
}

/** Whether this is text of the model's that the conversation goes on from. */
export const isAnswer = (turn) => turn?.role === "assistant" && Boolean(turn.content) && !turn.error;

/** What is sent: the questions that were answered with their answers, and the last question. */
export function messagesOf(system, turns) {
  const last = turns.findLastIndex(({ role }) => role === "user");
  const isSent = (each, index) => isAnswer(each) || (each.role === "user" && (index === last || isAnswer(turns[index + 1])));
  const said = turns.filter(isSent).map(({ role, content, attachments }) => ({ role, content: attachments ? [...attachments.map(asPart), { type: "text", text: content }] : content }));
  return system.trim() ? [{ role: "system", content: system }, ...said] : said;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Into the clipboard; pages that did not come by https or from this machine have only the older way. */
export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed: the older way may be */ }
  }
  const box = document.createElement("textarea");
  const before = document.activeElement;
  box.value = text;
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  before?.focus();
  return copied;
}
