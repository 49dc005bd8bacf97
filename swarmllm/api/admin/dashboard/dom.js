// Elements from calls, and a page that changes only where it must: focus, selection and what is typed stay.

const SVG = "http://www.w3.org/2000/svg";
const KEPT = new Set(["style", "open"]); // the second is the reader's
const SVG_TAGS = new Set(["svg", "path"]);

/** Attributes: `class`, `style` (an object; custom properties too), `onclick` and the like, a select's `value`, anything else by name. */
export function h(tag, attributes, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name.startsWith("on")) element[name] = value;
    else if (name !== "value" || tag !== "select") element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  if (tag === "select") element.value = attributes?.value ?? "";
  return element;
}

/** Make `parent` contain `children`. Elements of the same tag and `data-key` are kept and adjusted. */
export function show(parent, ...children) {
  const wanted = h("div", null, ...children);
  adjustChildren(parent, [...wanted.childNodes]);
}

function adjustChildren(parent, wanted) {
  const keyed = new Map();
  for (const node of parent.children) if (node.dataset?.key) keyed.set(node.dataset.key, node);
  wanted.forEach((fresh, index) => {
    const key = fresh.dataset?.key;
    let old = key ? keyed.get(key) : parent.childNodes[index];
    if (old && old.dataset?.key !== key) old = null;
    if (!old || old.nodeName !== fresh.nodeName) {
      parent.insertBefore(fresh, parent.childNodes[index] || null);
      return;
    }
    if (parent.childNodes[index] !== old) parent.insertBefore(old, parent.childNodes[index] || null);
    adjust(old, fresh);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function adjust(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  for (const { name } of [...old.attributes]) if (!KEPT.has(name) && !fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const name of ["onclick", "onsubmit", "onchange", "oninput", "onkeydown", "onpaste", "ondragover", "ondrop"]) if (old[name] !== fresh[name]) old[name] = fresh[name];
  const { value } = fresh; // Read first: a select loses its options to `old`.
  adjustChildren(old, [...fresh.childNodes]);
  if (old.nodeName === "SELECT" && old.value !== value) old.value = value;
}
