// What models write, as elements: so much of Markdown as they use. Nothing becomes HTML, so nothing in it can act.

import { h } from "./dom.js";
import { highlight } from "./highlight.js";

const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])([^*\n]+?)\*/s;
const FENCE = /^\s*(```|~~~)\s*([\w+#.-]*)\s*$/;
const BULLET = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;

/** Elements of a whole text, also of one that is still being written. */
export function markdown(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length;) {
    const fence = FENCE.exec(lines[i]);
    if (fence) {
      const end = lines.findIndex((line, at) => at > i && line.trim() === fence[1]);
      const code = lines.slice(i + 1, end < 0 ? lines.length : end);
      blocks.push(h("pre", { tabindex: "0", "aria-label": fence[2] ? `Code, ${fence[2]}` : "Code" }, h("code", null, highlight(code.join("\n"), fence[2]))));
      i = end < 0 ? lines.length : end + 1;
    } else if (BULLET.test(lines[i])) {
      const first = BULLET.exec(lines[i]);
      const items = [];
      for (let item; i < lines.length && (item = BULLET.exec(lines[i])) && Boolean(item[2]) === Boolean(first[2]); i += 1) {
        items.push(h("li", item[1].length > 1 ? { class: "inner" } : null, inline(item[3])));
      }
      blocks.push(first[2] ? h("ol", { start: first[2] }, items) : h("ul", null, items));
    } else if (HEADING.test(lines[i])) {
      blocks.push(h("p", { class: "heading" }, inline(HEADING.exec(lines[i])[2])));
      i += 1;
    } else if (!lines[i].trim()) {
      i += 1;
    } else {
      const from = i;
      while (i < lines.length && lines[i].trim() && (i === from || !(FENCE.test(lines[i]) || BULLET.test(lines[i]) || HEADING.test(lines[i])))) i += 1;
      blocks.push(h("p", null, inline(lines.slice(from, i).join("\n"))));
    }
  }
  return blocks;
}

function inline(text) {
  const found = INLINE.exec(text);
  if (!found) return [text];
  const [whole, , code, strong, emphasis] = found;
  const element = code !== undefined ? h("code", null, code) : strong !== undefined ? h("strong", null, inline(strong)) : h("em", null, inline(emphasis));
  return [text.slice(0, found.index), element, ...inline(text.slice(found.index + whole.length))];
}
