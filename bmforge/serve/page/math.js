// LaTeX formulas as a tree of MathML elements, {tag, isMath, attributes, children} or strings.
// As in markdown.js nothing here makes HTML. A formula that is not understood is null, and the page
// shows its source.
import { ACCENTS, ALPHABETS, FUNCTIONS, LARGE, LIMITS, OPERATORS, SPACES, SYMBOLS } from "./symbols.js";

const TOKEN = /\\(?:[A-Za-z]+\*?|[^])|\d+(?:[.,]\d+)*|\s+|[^]/gu;
const MOST_DEPTH = 60; // browsers and this parser recurse
const MOST_TOKENS = 5000;
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{." };
const GRIDS = new Set(["matrix", "smallmatrix", "array", "aligned", "align", "align*", "split", "gathered",
  "gather", "gather*", "equation", "equation*", ...Object.keys(FENCES)]);
const SIZES = /^\\(?:[bB]ig{1,2}[lrm]?)$/;

class Unknown extends Error {}

const node = (tag, children = [], attributes = {}) => ({ tag, isMath: true, attributes, children });
const row = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", nodes));
const operator = (text, attributes = {}) => node("mo", [text], attributes);

export function parseMath(source, isBlock = false) {
  const tokens = source.match(TOKEN) ?? [];
  if (tokens.length > MOST_TOKENS) return null;
  try {
    const reader = new Reader(tokens);
    const nodes = reader.row(() => reader.next === undefined);
    return node("math", nodes, isBlock ? { display: "block" } : {});
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Reader {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
    this.depth = 0;
    this.alphabet = "";
  }

  get next() { return this.tokens[this.at]; }

  take() {
    if (this.at >= this.tokens.length) throw new Unknown();
    return this.tokens[this.at++];
  }

  skip() { while (/^\s/.test(this.next ?? "")) this.at += 1; }

  row(isEnd) {
    if (++this.depth > MOST_DEPTH) throw new Unknown();
    const nodes = [];
    for (this.skip(); !isEnd(); this.skip()) {
      if (this.next === undefined) throw new Unknown();
      nodes.push(this.scripted());
    }
    this.depth -= 1;
    return nodes;
  }

  // One atom with its subscript, superscript and primes.
  scripted() {
    const base = /^[_^]$/.test(this.next) ? node("mrow") : this.atom();
    const scripts = {};
    for (this.skip(); this.next !== undefined; this.skip()) {
      if (this.next === "'") {
        let primes = "";
        while (this.next === "'") primes += this.take() && "′";
        scripts["^"] = row([operator(primes), ...(scripts["^"] ? [scripts["^"]] : [])]);
      } else if (this.next === "^" || this.next === "_") {
        const mark = this.take();
        const script = this.argument();
        if (scripts[mark] && mark === "_") throw new Unknown();
        scripts[mark] = scripts[mark] ? row([scripts[mark], script]) : script;
      } else if (this.next === "\\limits" || this.next === "\\nolimits") {
        base.isLimit = this.take() === "\\limits";
      } else {
        break;
      }
    }
    return attach(base, scripts._, scripts["^"]);
  }

  argument() {
    this.skip();
    if (/^\d{2}/.test(this.next ?? "")) { // a script is one digit without braces
      const digits = this.tokens[this.at];
      this.tokens.splice(this.at, 1, digits[0], digits.slice(1));
    }
    return this.atom();
  }

  group() {
    if (this.take() !== "{") throw new Unknown();
    const nodes = this.row(() => this.next === "}");
    this.at += 1;
    return nodes;
  }

  text() {
    this.skip();
    if (this.take() !== "{") throw new Unknown();
    let text = "";
    for (let open = 1; ;) {
      const token = this.take();
      if (token === "{") open += 1;
      if (token === "}" && --open === 0) return text;
      text += token === "{" || token === "}" ? "" : token.replace(/^\\(?=[^A-Za-z])/, "");
    }
  }

  atom() {
    if (++this.depth > MOST_DEPTH) throw new Unknown();
    const made = this.read();
    this.depth -= 1;
    return made;
  }

  read() {
    if (this.next === "{") return row(this.group());
    const token = this.take();
    if (token === "}" || token === "&" || token === "$" || token === "#") throw new Unknown();
    if (/^\d/.test(token)) return node("mn", [styled(token, this.alphabet)]);
    if (/^\p{L}/u.test(token)) return this.letter(token);
    if (token === "~") return node("mspace", [], { width: "0.33em" });
    if (token[0] !== "\\") return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
    return this.command(token.slice(1), token);
  }

  letter(token) {
    const text = styled(token, this.alphabet);
    return node("mi", [text], this.alphabet === "rm" ? { mathvariant: "normal" } : {});
  }

  command(name, token) {
    if (name in SPACES) return node("mspace", [], { width: SPACES[name] });
    if (name in SYMBOLS) return node("mi", [SYMBOLS[name]]);
    if (name in LARGE) return { ...operator(LARGE[name]), isLimit: !name.includes("int") };
    if (name in OPERATORS) return operator(OPERATORS[name]);
    if (FUNCTIONS.has(name)) return { ...node("mi", [name]), isLimit: LIMITS.has(name) };
    if (name in ACCENTS) return this.accent(ACCENTS[name]);
    if (name in ALPHABETS) return this.styledGroup(ALPHABETS[name]);
    if (/^[{}%$#&_|]$/.test(name)) return operator(name === "|" ? "‖" : name);
    if (SIZES.test(token)) return this.fence();
    if (/^[dt]?frac$/.test(name)) return node("mfrac", [this.argument(), this.argument()]);
    switch (name) {
      case "binom": return row([operator("("),
        node("mfrac", [this.argument(), this.argument()], { linethickness: "0" }), operator(")")]);
      case "sqrt": return this.root();
      case "text": case "textbf": case "textit": case "mbox": return node("mtext", [this.text()]);
      case "operatorname": case "operatorname*":
        return { ...node("mi", [this.text()]), isLimit: name.endsWith("*") };
      case "left": return this.fenced();
      case "begin": return this.environment();
      case "overset": case "stackrel": return this.over("mover");
      case "underset": return this.over("munder");
      case "displaystyle": case "textstyle": case "nonumber": return node("mrow");
      case "tag": return node("mtext", [`(${this.text()})`]);
      default: throw new Unknown();
    }
  }

  over(tag) {
    const script = this.argument();
    return node(tag, [this.argument(), script]);
  }

  accent([text, place]) {
    const base = this.argument();
    return { ...node(place, [base, operator(text)], { accent: "true" }), isLimit: text === "⏞" || text === "⏟" };
  }

  styledGroup(alphabet) {
    const before = this.alphabet;
    this.alphabet = alphabet;
    const made = this.argument();
    this.alphabet = before;
    return made;
  }

  root() {
    this.skip();
    if (this.next !== "[") return node("msqrt", [this.argument()]);
    this.at += 1;
    const degree = this.row(() => this.next === "]");
    this.at += 1;
    return node("mroot", [this.argument(), row(degree)]);
  }

  fence() {
    this.skip();
    const token = this.take();
    const text = token[0] === "\\" ? OPERATORS[token.slice(1)] ?? token.slice(1) : token;
    if (text.length > 1) throw new Unknown();
    return operator(text === "|" && token !== "|" ? "‖" : text === "." ? "" : text, { fence: "true" });
  }

  fenced() {
    const open = this.fence();
    const inner = this.row(() => this.next === "\\right");
    this.at += 1;
    return node("mrow", [open, ...inner, this.fence()]);
  }

  environment() {
    const name = this.text();
    if (!GRIDS.has(name)) throw new Unknown();
    if (name === "array") this.text(); // the columns' alignment
    const rows = [[]];
    for (;;) {
      const cell = this.row(() => ["&", "\\\\", "\\end"].includes(this.next));
      rows.at(-1).push(node("mtd", cell));
      const token = this.take();
      if (token === "\\\\") rows.push([]);
      if (token === "\\end") break;
    }
    if (this.text() !== name) throw new Unknown();
    const isBlank = ([cell, ...more]) => !more.length && !cell.children.length;
    if (rows.length > 1 && isBlank(rows.at(-1))) rows.pop();
    const grid = node("mtable", rows.map((cells) => node("mtr", cells)));
    const [open, close] = FENCES[name] ?? "";
    const fence = (text) => (text && text !== "." ? [operator(text, { fence: "true" })] : []);
    return open ? node("mrow", [...fence(open), grid, ...fence(close)]) : grid;
  }
}

function attach(base, below, above) {
  const { isLimit, ...plain } = base;
  const [low, high] = isLimit ? ["munder", "mover"] : ["msub", "msup"];
  if (below && above) return node(isLimit ? "munderover" : "msubsup", [plain, below, above]);
  if (below) return node(low, [plain, below]);
  return above ? node(high, [plain, above]) : plain;
}

// Letters of another alphabet are characters of their own in Unicode (U+1D400 and following).
function styled(text, alphabet) {
  if (!alphabet || alphabet === "rm") return text;
  const { upper, lower, digit, exceptions } = alphabet;
  return [...text].map((letter) => {
    if (exceptions?.[letter]) return exceptions[letter];
    const [start, first] = /[A-Z]/.test(letter) ? [upper, 65] : /[a-z]/.test(letter) ? [lower, 97] : [digit, 48];
    return start && /[A-Za-z0-9]/.test(letter) ? String.fromCodePoint(start + letter.codePointAt(0) - first) : letter;
  }).join("");
}
