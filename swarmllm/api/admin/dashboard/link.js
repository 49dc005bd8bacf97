// The one way to the node: requests with the key, and the event stream with its reconnections.

const KEY = "swarmllm-key";
export const store = { get key() { return sessionStorage.getItem(KEY); }, set key(value) { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); } };

const base = new URL(".", document.baseURI);
const headers = () => (store.key ? { Authorization: `Bearer ${store.key}` } : {});

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

/** The answer, or an Error whose message a person can read. */
export async function call(method, path, body, signal) {
  let answer;
  try {
    answer = await fetch(new URL(path, base), {
      method, signal,
      headers: { ...headers(), ...(body ? { "Content-Type": "application/json" } : {}) },
      body: body ? JSON.stringify(body) : undefined,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The node does not answer. Is it still running?");
  }
  if (!answer.ok) {
    let message = `The node answered with status ${answer.status}.`;
    try { message = (await answer.json()).error.message; } catch { /* not JSON: the status says it */ }
    throw new Refused(answer.status, message);
  }
  return answer;
}

/** The text of a streamed answer, cut at `mark`. */
export async function* pieces(answer, mark) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (pending + value).split(mark);
    pending = parts.pop();
    for (const part of parts) if (part) yield part;
  }
}

/** Follow /api/events for ever. `onSection(name, data)`, `onStatus(status, detail)`. */
export async function follow(onSection, onStatus) {
  let pause = 0.5;
  for (;;) {
    const watch = new AbortController();
    let timer;
    // A page that the browser keeps for "back" would keep its connection too, and there are only six.
    addEventListener("pagehide", () => watch.abort(), { once: true });
    const alive = () => { clearTimeout(timer); timer = setTimeout(() => watch.abort(), 25000); };
    try {
      alive();
      const answer = await call("GET", "api/events", null, watch.signal);
      onStatus("live");
      pause = 0.5;
      for await (const event of pieces(answer, "\n\n")) {
        alive();
        const match = /^event: (\w+)\ndata: (.*)$/s.exec(event);
        if (match) onSection(match[1], JSON.parse(match[2]));
      }
      onStatus("lost");
    } catch (error) {
      if (error.status === 401) { await onStatus("locked", error.message); continue; }
      if (error.status === 403) { onStatus("limited", error.message); return; }
      onStatus("lost", error.name === "AbortError" ? "" : error.message);
    } finally {
      clearTimeout(timer);
    }
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
    pause = Math.min(8, pause * 2);
  }
}
