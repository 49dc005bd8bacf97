// Pictures that go with a question: chosen, dropped or pasted, shown before they are sent, and kept with the conversation.

import { h } from "./dom.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 20 * 2 ** 20; // In base64 within what a node takes.
const THUMB_PX = 240;

/** {name, url, thumb}: what is sent and what is shown, both as data URLs. Throws an Error that names a file that is no picture. */
export async function readPictures(files) {
  return Promise.all([...files].map(async (file) => {
    if (!KINDS.includes(file.type)) throw new Error(`${file.name} is no PNG, JPEG, WebP or GIF.`);
    if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 2 ** 20} MiB.`);
    try { return { name: file.name, url: await dataUrl(file), thumb: await thumbnail(file) }; } catch { throw new Error(`${file.name} cannot be read as a picture.`); }
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

/** With a button for each that takes it away, where `onRemove` is given. */
export function gallery(pictures, onRemove = null) {
  return h("ul", { class: "pictures", "data-key": "pictures" }, pictures.map(({ name, thumb }, index) => h("li", null,
    h("img", { src: thumb, alt: name }),
    onRemove && h("button", { type: "button", class: "plain", "aria-label": `Remove ${name}`, onclick: () => onRemove(index) }, "Remove"))));
}

/** What takes files on the composer: a button, dropping, and pasting. */
export function intake(onFiles) {
  const hasFiles = (transfer) => [...(transfer?.items || [])].some((item) => item.kind === "file");
  const taken = (event, transfer) => {
    if (!hasFiles(transfer)) return;
    event.preventDefault();
    onFiles(transfer.files);
  };
  return {
    button: [
      h("button", { type: "button", class: "quiet", "data-key": "add-picture", onclick: () => document.querySelector("#pictures").click() }, "Add picture"),
      h("input", { id: "pictures", "data-key": "pictures-input", type: "file", hidden: true, multiple: true, accept: KINDS.join(), onchange: ({ target }) => { onFiles(target.files).then(() => { target.value = ""; }); } }),
    ],
    drop: { ondragover: (event) => { if (hasFiles(event.dataTransfer)) event.preventDefault(); }, ondrop: (event) => taken(event, event.dataTransfer) },
    paste: { onpaste: (event) => taken(event, event.clipboardData) },
  };
}
