// Markdown as a tree of plain objects, {tag, children, ...} or strings. Nothing here makes HTML:
// page code creates elements from the tree, so that what a model writes can never be a script.
import { parseMath } from "./math.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([^`\n]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const CELLS = /^\s*\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*$/;
const INLINE = new RegExp([
  "(?<code>`+)(?<inner>.+?)(?<!`)\\k<code>(?!`)",
  // As in Pandoc: "$5 and $6" is no formula.
  "(?<![\\\\$])\\$(?<tex>(?![\\s$])(?:[^$\\\\\\n]|\\\\.)*?(?<!\\s))\\$(?![\\d$])",
  "\\\\\\((?<paren>.+?)\\\\\\)",
  "(?:\\$\\$(?<dollars>[^$]+?)\\$\\$|\\\\\\[(?<bracket>.+?)\\\\\\])",
  "\\*\\*(?<strong>(?!\\s)(?:[^*]|\\*(?!\\*))+?)\\*\\*(?!\\*)",
  "(?<![\\w*])[*_](?<em>(?![\\s*_])[^*_\\n]+?(?<!\\s))[*_](?![\\w*])",
  "~~(?<del>[^~\\n]+)~~",
  "!?\\[(?<label>[^\\[\\]\\n]*)\\]\\((?<href>[^()\\s]+)\\)",
  "(?<url>https?://[^\\s<>()\"'`]+[^\\s<>()\"'`.,;:!?])",
  "\\\\(?<escaped>[\\\\`*_{}\\[\\]()#+\\-.!|~>$])",
].join("|"), "gs");

// Only addresses that open a page or a mail; others stay text.
const isSafe = (href) => /^(https?:|mailto:)/i.test(href);

export function parseInline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index < end) continue;
    nodes.push(...breakLines(text.slice(end, match.index)));
    const { inner, strong, em, del, label, href, url, escaped } = match.groups;
    const { tex, paren, dollars, bracket } = match.groups;
    const formula = tex ?? paren ?? dollars ?? bracket;
    if (formula !== undefined) {
      const isBlock = (tex ?? paren) === undefined;
      nodes.push(parseMath(formula, isBlock) ?? { tag: "code", children: [match[0]] });
    } else if (inner !== undefined) nodes.push({ tag: "code", children: [inner.replace(/^ (.*) $/s, "$1")] });
    else if (strong !== undefined) nodes.push({ tag: "strong", children: parseInline(strong) });
    else if (em !== undefined) nodes.push({ tag: "em", children: parseInline(em) });
    else if (del !== undefined) nodes.push({ tag: "del", children: parseInline(del) });
    else if (escaped !== undefined) nodes.push(escaped);
    else if (url !== undefined) nodes.push({ tag: "a", href: url, children: [url] });
    else if (isSafe(href)) nodes.push({ tag: "a", href, children: parseInline(label || href) });
    else nodes.push(match[0]);
    end = match.index + match[0].length;
  }
  nodes.push(...breakLines(text.slice(end)));
  return nodes;
}

function breakLines(text) {
  return text.split("\n").flatMap((line, number) => {
    const shown = line ? [line] : [];
    return number ? [{ tag: "br", children: [] }, ...shown] : shown;
  });
}

export function parseMarkdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const block = readBlock(lines, at);
    if (block.node) blocks.push(block.node);
    at = block.next;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  if (!line.trim()) return { next: at + 1 };
  if (FENCE.test(line)) return readCode(lines, at);
  const formula = readFormula(lines, at);
  if (formula) return formula;
  const heading = line.match(/^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/);
  if (heading) {
    const node = { tag: `h${heading[1].length}`, children: parseInline(heading[2]) };
    return { node, next: at + 1 };
  }
  if (RULE.test(line)) return { node: { tag: "hr", children: [] }, next: at + 1 };
  if (/^ {0,3}>/.test(line)) return readQuote(lines, at);
  if (line.includes("|") && CELLS.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")
      && cellsOf(line).length === cellsOf(lines[at + 1]).length) return readTable(lines, at);
  if (ITEM.test(line)) return readList(lines, at);
  return readParagraph(lines, at);
}

function readCode(lines, at) {
  const [, mark, language] = lines[at].match(FENCE);
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n") + (end > at + 1 ? "\n" : "");
  return { node: { tag: "pre", language: language.trim(), children: [code] }, next: end + 1 };
}

// A displayed formula on lines of its own; while it is streamed, without its end, it is text.
function readFormula(lines, at) {
  const open = lines[at].match(/^\s*(\$\$|\\\[)/)?.[1];
  if (!open) return null;
  const close = open === "$$" ? "$$" : "\\]";
  let end = at;
  let text = lines[at].slice(lines[at].indexOf(open) + 2);
  while (!text.includes(close)) {
    end += 1;
    if (end >= lines.length || !lines[end].trim()) return null;
    text += `\n${lines[end]}`;
  }
  if (!text.endsWith(close) && text.slice(text.indexOf(close) + 2).trim()) return null;
  const formula = text.slice(0, text.indexOf(close));
  const math = parseMath(formula, true) ?? { tag: "code", children: [open + formula + close] };
  return { node: { tag: "p", children: [math] }, next: end + 1 };
}

function readQuote(lines, at) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { node: { tag: "blockquote", children: parseMarkdown(inner.join("\n")) }, next: end };
}

function cellsOf(line) {
  return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
}

function readTable(lines, at) {
  const aligns = cellsOf(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return cell.startsWith(":") ? "left" : "";
  });
  const row = (line, tag) => ({
    tag: "tr",
    children: aligns.map((align, n) => (
      { tag, align, children: parseInline((cellsOf(line)[n] ?? "").replaceAll("\\|", "|")) })),
  });
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const children = [{ tag: "thead", children: [row(lines[at], "th")] }];
  if (body.length) children.push({ tag: "tbody", children: body });
  return { node: { tag: "table", children }, next: end };
}

function readList(lines, at) {
  const [, indent, mark] = lines[at].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const item = lines[next].match(ITEM);
    const isOther = !item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered;
    if (isOther || item[1].length < indent.length) break;
    const width = item[0].length - item[3].length;
    const inner = [item[3]];
    next += 1;
    while (next < lines.length) {
      const line = lines[next];
      const depth = line.length - line.trimStart().length;
      if (!line.trim()) {
        const after = lines[next + 1] ?? "";
        if (!after.trim() || after.length - after.trimStart().length <= indent.length) break;
        inner.push("");
      } else if (depth > indent.length && (depth >= width || !ITEM.test(line) || depth >= 2)) {
        inner.push(line.slice(Math.min(depth, width)));
      } else {
        break;
      }
      next += 1;
    }
    const blocks = parseMarkdown(inner.join("\n"));
    // A paragraph alone needs no element of its own.
    const children = blocks.flatMap((block, n) => (n === 0 && block.tag === "p" ? block.children : [block]));
    items.push({ tag: "li", children });
    if (!lines[next]?.trim() && ITEM.test(lines[next + 1] ?? "")) next += 1;
  }
  const node = { tag: isOrdered ? "ol" : "ul", children: items };
  if (isOrdered && parseInt(mark, 10) !== 1) node.start = parseInt(mark, 10);
  return { node, next };
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !FENCE.test(lines[end])
      && !/^ {0,3}(#{1,6}\s|>)/.test(lines[end]) && !RULE.test(lines[end]) && !ITEM.test(lines[end])) {
    end += 1;
  }
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { node: { tag: "p", children: parseInline(text) }, next: end };
}
