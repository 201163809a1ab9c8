// Creates elements. Texts become text nodes and never HTML; the page's policy forbids the latter too.
import { highlight } from "./highlight.js";
import { parseMarkdown } from "./markdown.js";

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(text, work, className = "quiet small") {
  const element = make("button", { type: "button", className, textContent: text });
  element.addEventListener("click", work);
  return element;
}

export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // Without TLS a page from another machine has no clipboard: select and copy.
  const area = make("textarea", { value: text, className: "offscreen" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function code(node, say) {
  const text = node.children[0];
  const parts = highlight(text, node.language.split(/\s/)[0] ?? "");
  const inner = parts.map(([kind, part]) => (
    kind ? make("span", { className: `code-${kind}`, textContent: part }) : part));
  const head = make("div", { className: "code-head" },
    make("span", { textContent: node.language }), button(say("copy"), () => copyText(text)));
  return make("div", { className: "code" }, head, make("pre", {}, ...inner));
}

function mathElement(node) {
  if (typeof node === "string") return node;
  const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", node.tag);
  for (const [name, value] of Object.entries(node.attributes)) made.setAttribute(name, value);
  made.append(...node.children.map(mathElement));
  return made;
}

function element(node, say) {
  if (typeof node === "string") return node;
  if (node.tag === "pre") return code(node, say);
  if (node.isMath) return mathElement(node);
  const made = make(node.tag, {}, ...node.children.map((child) => element(child, say)));
  if (node.tag === "a") {
    Object.assign(made, { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer" });
  }
  if (node.align) made.classList.add(`align-${node.align}`);
  if (node.start) made.start = node.start;
  return node.tag === "table" ? make("div", { className: "table" }, made) : made;
}

export function showMarkdown(place, text, say) {
  place.replaceChildren(...parseMarkdown(text).map((node) => element(node, say)));
}
