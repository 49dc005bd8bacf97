// Pictures and sounds that go with a question: chosen, dropped or pasted, shown before they are sent, and kept with the conversation.

import { h } from "./dom.js";

const KINDS = {
  picture: { types: ["image/png", "image/jpeg", "image/webp", "image/gif"], formats: "PNG, JPEG, WebP or GIF" },
  sound: { types: ["audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/mpeg", "audio/mp3", "audio/flac", "audio/x-flac"], formats: "WAV, MP3 or FLAC" },
};
const MAX_BYTES = 20 * 2 ** 20; // In base64 within what a node takes.
const THUMB_PX = 240;

/** {kind, name, url, thumb}: what is sent, as a data URL, and of a picture what is shown. `takes`: kinds that the model takes. Throws an Error that names a file that is none of them. */
export async function readFiles(files, takes) {
  return Promise.all([...files].map(async (file) => {
    const kind = takes.find((each) => KINDS[each].types.includes(file.type));
    if (!kind) throw new Error(`${file.name} is no ${takes.map((each) => KINDS[each].formats).join(", and no ")}.`);
    if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 2 ** 20} MiB.`);
    try {
      return { kind, name: file.name, url: await dataUrl(file), ...(kind === "picture" ? { thumb: await thumbnail(file) } : {}) };
    } catch { throw new Error(`${file.name} cannot be read as a ${kind}.`); }
  }));
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// The page is drawn with every token: it shows small pictures.
async function thumbnail(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, THUMB_PX / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", 0.85);
}

const played = new WeakMap(); // A sound's short address in this page, by the attachment.

function playable(sound) {
  if (!played.has(sound)) {
    const bytes = Uint8Array.from(atob(base64(sound)), (character) => character.charCodeAt(0));
    played.set(sound, URL.createObjectURL(new Blob([bytes], { type: mediaType(sound) })));
  }
  return played.get(sound);
}

const base64 = ({ url }) => url.slice(url.indexOf(",") + 1);
const mediaType = ({ url }) => url.slice("data:".length, url.indexOf(";"));

/** As a part of a message to the OpenAI API. */
export function asPart(attachment) {
  if (attachment.kind === "picture") return { type: "image_url", image_url: { url: attachment.url } };
  const media = mediaType(attachment);
  return { type: "input_audio", input_audio: { data: base64(attachment), format: media.includes("flac") ? "flac" : media.includes("wav") ? "wav" : "mp3" } };
}

/** With a button for each that takes it away, where `onRemove` is given. */
export function gallery(attachments, onRemove = null) {
  return h("ul", { class: "attachments", "data-key": "attachments" }, attachments.map((each, index) => h("li", null,
    each.kind === "picture" ? h("img", { src: each.thumb, alt: each.name })
      : [h("span", { class: "small cut" }, each.name), h("audio", { src: playable(each), controls: true, preload: "none", "aria-label": each.name })],
    onRemove && h("button", { type: "button", class: "plain", "aria-label": `Remove ${each.name}`, onclick: () => onRemove(index) }, "Remove"))));
}

/** What takes files on the composer: a button, dropping, and pasting. `takes`: kinds that the model takes. */
export function intake(onFiles, takes) {
  const hasFiles = (transfer) => [...(transfer?.items || [])].some((item) => item.kind === "file");
  const taken = (event, transfer) => {
    if (!hasFiles(transfer)) return;
    event.preventDefault();
    onFiles(transfer.files);
  };
  return {
    button: [
      h("button", { type: "button", class: "quiet", "data-key": "add-files", onclick: () => document.querySelector("#files").click() }, `Add ${takes.join(" or ")}`),
      h("input", { id: "files", "data-key": "files-input", type: "file", hidden: true, multiple: true, accept: takes.flatMap((each) => KINDS[each].types).join(), onchange: ({ target }) => { onFiles(target.files).then(() => { target.value = ""; }); } }),
    ],
    drop: { ondragover: (event) => { if (hasFiles(event.dataTransfer)) event.preventDefault(); }, ondrop: (event) => taken(event, event.dataTransfer) },
    paste: { onpaste: (event) => taken(event, event.clipboardData) },
  };
}
