// The page: tabs, settings, memory, text and documents; the chat is in chat.js.
import { Chat } from "./chat.js";
import { ask, readEvents } from "./client.js";
import { make } from "./elements.js";
import { WORDS } from "./words.js";

const at = (id) => document.getElementById(id);
const SETTINGS = [
  ["temperature", { min: 0, max: 2, step: 0.05 }], ["top_p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", { min: 1, step: 1 }], ["min_p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", { min: 0.1, max: 10, step: 0.05 }],
  ["max_tokens", { min: 1, step: 1 }], ["seed", { min: 0, step: 1 }],
];
const EXAMPLE = { input: "今天天气真好。", prompt: "翻译成英文", "<ans>": "" };

const NAMES = SETTINGS.map(([name]) => name);

let language = navigator.language.startsWith("zh") ? "zh" : "en";
let server = null; // what /page/state says
let running = null; // the AbortController of what is being written

const say = (key, ...given) => {
  const words = WORDS[language][key];
  return typeof words === "function" ? words(...given) : words ?? key;
};

function tell(problem) {
  at("problem").hidden = !problem;
  at("problem-text").textContent = problem ?? "";
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
  const asked = {
    model: at("set-model").value || server.model, stream: true,
    stream_options: { include_usage: true }, ...readSettings(NAMES), ...body,
  };
  let isCut = false;
  for await (const event of readEvents(await ask(path, asked, signal))) {
    const choice = event.choices[0];
    if (choice) {
      take(choice.delta?.content ?? choice.text ?? "", choice.delta?.reasoning_content ?? "");
      isCut ||= choice.finish_reason === "length";
    }
    if (event.usage) {
      const took = say("took", event.usage.completion_tokens, (performance.now() - begin) / 1000);
      at("took").textContent = isCut ? `${took}. ${say("cut")}` : took;
    }
  }
}

// --- the rooms ---

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

// --- around them ---

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
  const values = Object.fromEntries([...at("settings").querySelectorAll("input, select, textarea")]
    .map((input) => [input.id, input.value]));
  const system = make("label", { className: "wide" }, say("system"),
    make("textarea", { id: "set-system", rows: 2, placeholder: say("usual") }));
  const models = (server?.models ?? []).map((name) => make("option", { textContent: name }));
  const model = make("label", { className: "wide", hidden: models.length < 2 }, say("model"),
    make("select", { id: "set-model" }, ...models));
  at("settings").replaceChildren(model, system, ...SETTINGS.map(([name, range]) => make("label", {},
    say(name), make("input",
      { id: `set-${name}`, type: "number", placeholder: say("usual"), ...range }))));
  for (const [id, value] of Object.entries(values)) {
    if (value !== "") at(id).value = value;
  }
}

// Settings belong to a conversation: they are shown when it is opened, and kept with it.
function takeSettings() {
  const kept = readSettings(NAMES);
  const [system, model] = [at("set-system").value, at("set-model").value];
  if (system) kept.system = system;
  if (model && model !== server?.model) kept.model = model;
  return kept;
}

function putSettings(settings) {
  for (const name of [...NAMES, "system"]) at(`set-${name}`).value = settings[name] ?? "";
  at("set-model").value = settings.model ?? server?.model ?? "";
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
  for (const room of ["chat", "text", "documents"]) at(`${room}-text`).ariaLabel = say(room);
  at("chat-text").placeholder = say("askHere");
  at("text-text").placeholder = say("textHere");
  at("documents-about").textContent = say("documentsAbout");
  at("writing-title").textContent = say("writing");
  at("chat-clear").textContent = say("newChat");
  at("problem-close").ariaLabel = say("close");
  at("memory-title").textContent = say("memory");
  showSettings();
  chat.speak();
  if (server) {
    showTabs();
    showMemory();
  }
}

async function refresh() {
  try {
    server = await (await ask("/page/state")).json();
    at("model").textContent = server.model;
    if (at("set-model").options.length !== server.models.length) {
      showSettings();
      putSettings(chat.current.settings);
    }
    at("license").textContent = say("license", server.license);
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

const chat = new Chat({
  say, tell, write, takeSettings, putSettings,
  stream: (body, signal, take) => stream("/v1/chat/completions", body, signal, take),
});
listen("chat", () => chat.send(), () => chat.begin());
listen("text", continueText, () => { at("text-text").value = ""; });
listen("documents", fillDocument, () => {
  at("documents-text").value = JSON.stringify(EXAMPLE, null, 2);
  at("filled").replaceChildren();
});
at("language").addEventListener("click", () => {
  language = language === "zh" ? "en" : "zh";
  speak();
});
at("documents-text").value = JSON.stringify(EXAMPLE, null, 2);
speak();
refresh();
at("problem-close").addEventListener("click", () => tell(null));
setInterval(refresh, 5000);
