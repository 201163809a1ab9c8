// The page: chat, text and documents. Whatever a model writes becomes text nodes, never HTML.
import { WORDS } from "./words.js";

const at = (id) => document.getElementById(id);
const SETTINGS = [
  ["temperature", { min: 0, max: 2, step: 0.05 }], ["top_p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", { min: 1, step: 1 }], ["min_p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", { min: 0.1, max: 10, step: 0.05 }],
  ["max_tokens", { min: 1, step: 1 }], ["seed", { min: 0, step: 1 }],
];
const EXAMPLE = { input: "今天天气真好。", prompt: "翻译成英文", "<ans>": "" };

let language = navigator.language.startsWith("zh") ? "zh" : "en";
let server = null; // what /page/state says
let running = null; // the AbortController of what is being written
const history = []; // of the chat: {role, content}

const say = (key, ...given) => {
  const words = WORDS[language][key];
  return typeof words === "function" ? words(...given) : words ?? key;
};

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function tell(problem) {
  at("problem").hidden = !problem;
  at("problem").textContent = problem ?? "";
}

// What was written, with blocks between ``` marks as code.
function show(place, text) {
  const parts = text.split("```").map((part, number) => {
    const plain = number ? part.replace(/^\n/, "") : part;
    if (number % 2 === 0) return document.createTextNode(plain);
    return make("pre", { textContent: part.replace(/^[\w+-]*\n/, "") });
  });
  place.replaceChildren(...parts);
}

// --- talking to the server ---

async function ask(path, body, signal) {
  const options = body && {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  };
  const response = await fetch(new URL(`..${path}`, import.meta.url), { ...options, signal });
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new Error(found?.error?.message ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

async function* readEvents(response) {
  const decoder = new TextDecoder(); // keeps half of a character until the rest comes
  const reader = response.body.getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const found = JSON.parse(event.slice(6));
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}

function readSettings(names) {
  const found = {};
  for (const [name] of SETTINGS) {
    const value = at(`set-${name}`).value;
    if (value !== "" && names.includes(name)) found[name] = Number(value);
  }
  return found;
}

// Run what writes something, with its stop button, and say what went wrong.
async function write(room, work) {
  if (running) return;
  running = new AbortController();
  tell(null);
  at(`${room}-stop`).hidden = false;
  at(`${room}-send`).disabled = true;
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      tell(error instanceof TypeError ? say("lost") + error.message : error.message);
    }
  } finally {
    running = null;
    at(`${room}-stop`).hidden = true;
    at(`${room}-send`).disabled = false;
    refresh();
  }
}

async function stream(path, body, signal, take) {
  const begin = performance.now();
  const names = SETTINGS.map(([name]) => name);
  const asked = {
    model: server.model, stream: true, stream_options: { include_usage: true },
    ...readSettings(names), ...body,
  };
  let isCut = false;
  for await (const event of readEvents(await ask(path, asked, signal))) {
    const choice = event.choices[0];
    if (choice) {
      take(choice.delta?.content ?? choice.text ?? "");
      isCut ||= choice.finish_reason === "length";
    }
    if (event.usage) {
      const took = say("took", event.usage.completion_tokens, (performance.now() - begin) / 1000);
      at("took").textContent = isCut ? `${took}. ${say("cut")}` : took;
    }
  }
}

// --- the rooms ---

function addSaid(role, content) {
  const words = make("div", { className: "words" });
  show(words, content);
  const who = make("span", { className: "who", textContent: say(role) });
  who.dataset.role = role;
  at("said").querySelector(".empty")?.remove();
  at("said").append(make("li", { className: role }, who, words));
  at("said").scrollTop = at("said").scrollHeight;
  return words;
}

function showNothing() {
  at("said").replaceChildren(make("p", { className: "empty", textContent: say("nothing") }));
}

function chat() {
  const text = at("chat-text").value;
  if (!text.trim() || running) return;
  at("chat-text").value = "";
  addSaid("user", text);
  history.push({ role: "user", content: text });
  write("chat", async (signal) => {
    const place = addSaid("assistant", "");
    place.classList.add("writing");
    const system = at("set-system").value;
    const messages = system ? [{ role: "system", content: system }, ...history] : [...history];
    let answer = "";
    try {
      await stream("/v1/chat/completions", { messages }, signal, (piece) => {
        answer += piece;
        show(place, answer);
        at("said").scrollTop = at("said").scrollHeight;
      });
    } finally {
      place.classList.remove("writing");
      if (history.length) history.push({ role: "assistant", content: answer }); // not when cleared
    }
  });
}

function continueText() {
  const place = at("text-text");
  if (!place.value) return;
  const limit = readSettings(["max_tokens"]).max_tokens ?? 128;
  write("text", (signal) =>
    stream("/v1/completions", { prompt: place.value, max_tokens: limit }, signal, (piece) => {
      place.value += piece;
      place.scrollTop = place.scrollHeight;
    }));
}

function fillDocument() {
  let document;
  try {
    document = JSON.parse(at("documents-text").value);
  } catch (error) {
    tell(say("noJson") + error.message);
    return;
  }
  write("documents", async (signal) => {
    const documents = Array.isArray(document) ? document : [document];
    const names = ["temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed"];
    const body = { model: server.model, documents, ...readSettings(names) };
    const found = await (await ask("/v1/documents", body, signal)).json();
    at("filled").replaceChildren(
      ...found.data.map((one) => make("pre", { textContent: JSON.stringify(one, null, 2) })));
  });
}

// --- what stands around them ---

function size(bytes) {
  for (const [unit, one] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= one) return `${(bytes / one).toFixed(bytes >= 100 * one ? 0 : 1)} ${unit}`;
  }
  return `${bytes} B`;
}

function showMemory() {
  const used = server.parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const all = server.parts.map(([name, bytes], n) => [name, bytes, `p${n}`]);
  const free = ["free", Math.max(0, server.budget_bytes - used), "free"];
  // Beside a whole machine that is free nothing else could be seen.
  const barred = used * 8 < server.budget_bytes ? all : [...all, free];
  at("bar").replaceChildren(...barred.map(([name, bytes, kind]) => {
    const part = make("span", { className: kind, title: `${say(name)}: ${size(bytes)}` });
    part.style.flex = `${bytes} 1 0`;
    return part;
  }));
  at("parts").replaceChildren(...[...all, free].filter(([, bytes]) => bytes).map(([name, bytes, kind]) => make("tr", {},
    make("td", {}, make("i", { className: kind }), say(name)),
    make("td", { textContent: size(bytes) }))));
  at("busy").textContent = say("busy", server);
}

function showSettings() {
  const values = Object.fromEntries([...at("settings").querySelectorAll("input")].map(
    (input) => [input.id, input.value]));
  const system = make("label", { className: "wide" }, say("system"),
    make("input", { id: "set-system", placeholder: say("usual") }));
  at("settings").replaceChildren(system, ...SETTINGS.map(([name, range]) => make("label", {},
    say(name), make("input",
      { id: `set-${name}`, type: "number", placeholder: say("usual"), ...range }))));
  for (const [id, value] of Object.entries(values)) at(id).value = value;
}

function choose(room) {
  for (const one of ["chat", "text", "documents"]) at(one).hidden = one !== room;
  for (const tab of at("tabs").children) {
    tab.setAttribute("aria-selected", String(tab.dataset.room === room));
  }
  at(`${room}-text`).focus();
}

function showTabs() {
  const needs = { chat: "chat", text: "completions", documents: "documents" };
  const rooms = Object.keys(needs).filter((room) => server.abilities.includes(needs[room]));
  const chosen = rooms.find((room) => !at(room).hidden) ?? rooms[0];
  at("tabs").replaceChildren(...rooms.map((room) => {
    const tab = make("button", { type: "button", role: "tab", textContent: say(room) });
    tab.dataset.room = room;
    tab.addEventListener("click", () => choose(room));
    return tab;
  }));
  if (chosen) choose(chosen);
}

function speak() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  at("language").textContent = say("other");
  for (const room of ["chat", "text", "documents"]) {
    at(`${room}-stop`).textContent = say("stop");
    at(`${room}-clear`).textContent = say("clear");
  }
  at("chat-send").textContent = say("send");
  at("text-send").textContent = say("go");
  at("documents-send").textContent = say("fill");
  at("chat-text").placeholder = say("askHere");
  at("text-text").placeholder = say("textHere");
  at("documents-about").textContent = say("documentsAbout");
  at("writing-title").textContent = say("writing");
  at("memory-title").textContent = say("memory");
  for (const who of document.querySelectorAll(".who")) who.textContent = say(who.dataset.role);
  if (!history.length) showNothing();
  showSettings();
  if (server) {
    showTabs();
    showMemory();
  }
}

async function refresh() {
  try {
    server = await (await ask("/page/state")).json();
    at("model").textContent = server.model;
    at("licence").textContent = say("licence", server.licence);
    if (!at("tabs").children.length) showTabs();
    showMemory();
  } catch (error) {
    tell(say("lost") + error.message);
  }
}

function listen(room, work, clear) {
  at(`${room}-form`).addEventListener("submit", (event) => {
    event.preventDefault();
    work();
  });
  at(`${room}-stop`).addEventListener("click", () => running?.abort());
  at(`${room}-clear`).addEventListener("click", () => {
    running?.abort();
    tell(null);
    clear();
  });
}

listen("chat", chat, () => {
  history.length = 0;
  showNothing();
});
listen("text", continueText, () => { at("text-text").value = ""; });
listen("documents", fillDocument, () => {
  at("documents-text").value = JSON.stringify(EXAMPLE, null, 2);
  at("filled").replaceChildren();
});
at("chat-text").addEventListener("keydown", (event) => {
  // While Chinese is being composed, Enter belongs to the input method.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    chat();
  }
});
at("language").addEventListener("click", () => {
  language = language === "zh" ? "en" : "zh";
  speak();
});
at("documents-text").value = JSON.stringify(EXAMPLE, null, 2);
speak();
refresh();
setInterval(refresh, 5000);
