// The chat: conversations that the browser keeps, and what can be done with their messages.
import { button, copyText, make, showMarkdown } from "./elements.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);
const NEAR = 40; // pixels from the end, within which the view follows the text
const MOST_BYTES = 1 << 19; // of an attached file

export class Chat {
  // app: {say, tell, write, stream, takeSettings, putSettings} of the page.
  constructor(app) {
    this.app = app;
    this.all = store.load(localStorage);
    // A reload shows the conversation of this tab again.
    const last = sessionStorage.getItem("conversation");
    this.current = this.all.find((one) => one.id === last) ?? store.newConversation();
    this.listen();
  }

  listen() {
    at("chat-text").addEventListener("keydown", (event) => {
      // While Chinese is composed, Enter belongs to the input method; Safari says so by 229 alone.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.send();
    });
    at("search").addEventListener("input", () => this.showSaved());
    at("export").addEventListener("click", () => this.exportAll());
    at("import").addEventListener("click", () => at("import-file").click());
    at("import-file").addEventListener("change", () => this.importFile());
    at("attach").addEventListener("click", () => at("attach-file").click());
    at("attach-file").addEventListener("change", () => this.attach());
    addEventListener("storage", () => this.takeSaved());
    at("settings").addEventListener("change", () => {
      this.current.settings = this.app.takeSettings();
      this.keep();
    });
  }

  speak() {
    const { say } = this.app;
    for (const id of ["export", "import", "attach"]) at(id).textContent = say(id);
    at("saved-title").textContent = say("saved");
    at("search").placeholder = at("search").ariaLabel = say("search");
    this.show();
  }

  begin() {
    this.current = store.newConversation(this.app.takeSettings());
    this.show();
    at("chat-text").focus();
  }

  open(conversation) {
    this.current = conversation;
    this.app.putSettings(conversation.settings);
    this.show();
  }

  // Save all conversations, also those of other tabs; show an error if the browser's storage is full.
  keep(removed = null) {
    if (this.current.messages.length && !this.all.includes(this.current)) this.all.push(this.current);
    const isOther = ({ id }) => id !== this.current.id && id !== removed;
    this.all = store.merge(this.all, store.load(localStorage).filter(isOther));
    try {
      store.save(localStorage, this.all);
    } catch (error) {
      this.app.tell(this.app.say("full") + error.message);
    }
    this.showSaved();
  }

  // Take the conversations that another tab has saved.
  takeSaved() {
    const own = this.current.messages.length ? [this.current] : [];
    const others = store.load(localStorage).filter(({ id }) => id !== this.current.id);
    this.all = [...own, ...others];
    this.showSaved();
  }

  // --- sending ---

  send() {
    const text = at("chat-text").value;
    if (!text.trim() || !at("chat-stop").hidden) return;
    at("chat-text").value = "";
    this.current.messages.push({ role: "user", content: text });
    this.current.settings = this.app.takeSettings();
    this.keep();
    this.show();
    this.answer({ role: "assistant", content: "" });
  }

  // Let the model write a message, or go on with the last one.
  answer(message, more = {}) {
    const conversation = this.current;
    const before = message.content;
    this.app.write("chat", async (signal) => {
      const place = this.addMessage(message);
      place.words.classList.add("writing");
      const take = (piece, thought) => {
        message.content += piece;
        if (thought) message.thoughts = (message.thoughts ?? "") + thought;
        this.follow(() => this.fill(place, message));
      };
      try {
        await this.sendTurns(conversation, take, signal, more);
      } finally {
        this.finish(conversation, message, before);
      }
    });
  }

  // Send the conversation; while it is too long, leave out its oldest turn.
  async sendTurns(conversation, take, signal, more) {
    for (;;) {
      try {
        const messages = store.sentMessages(conversation);
        await this.app.stream({ messages, ...more }, signal, take);
        return;
      } catch (error) {
        if (error.code !== "context_length_exceeded" || !store.dropTurn(conversation)) throw error;
      }
    }
  }

  // Keep what was written; a message without an answer is given back to be edited.
  finish(conversation, message, before) {
    const { messages } = conversation;
    if (message.content === before && !message.thoughts) {
      if (messages.at(-1)?.role === "user" && !at("chat-text").value) {
        at("chat-text").value = messages.pop().content;
      }
    } else if (!messages.includes(message)) {
      messages.push(message);
    }
    conversation.time = Date.now();
    this.keep();
    if (conversation === this.current) this.follow(() => this.show());
  }

  // --- showing ---

  // Change the view, and stay at its end only if it was there: who reads above is not moved.
  follow(change) {
    const said = at("said");
    const isAtEnd = said.scrollHeight - said.scrollTop - said.clientHeight < NEAR;
    const top = said.scrollTop;
    change();
    said.scrollTop = isAtEnd ? said.scrollHeight : top;
  }

  show() {
    const { say } = this.app;
    const { id, messages, dropped } = this.current;
    sessionStorage.setItem("conversation", id);
    at("said").replaceChildren();
    if (!messages.length) {
      at("said").append(make("p", { className: "empty", textContent: say("nothing") }));
    }
    messages.forEach((message, number) => {
      if (dropped && number === dropped) {
        at("said").append(make("p", { className: "note", textContent: say("dropped", dropped) }));
      }
      this.addMessage(message, number);
    });
    at("said").scrollTop = at("said").scrollHeight;
    this.showSaved();
  }

  addMessage(message, number = null) {
    const { say } = this.app;
    at("said").querySelector(".empty")?.remove();
    const who = make("span", { className: "who", textContent: say(message.role) });
    const thoughts = make("details", { className: "thoughts", hidden: true },
      make("summary", { textContent: say("thoughts") }), make("div"));
    const words = make("div", { className: "words" });
    const item = make("li", { className: message.role }, who, thoughts, words);
    if (number !== null) item.append(this.actions(message, number));
    const place = { thoughts, words };
    this.fill(place, message);
    this.follow(() => at("said").append(item));
    return place;
  }

  fill(place, message) {
    place.thoughts.hidden = !message.thoughts;
    place.thoughts.lastChild.textContent = message.thoughts ?? "";
    if (message.role === "user") place.words.textContent = message.content;
    else showMarkdown(place.words, message.content, this.app.say);
  }

  actions(message, number) {
    const { say } = this.app;
    const isLast = number === this.current.messages.length - 1;
    const row = make("div", { className: "actions" });
    row.append(button(say("copy"), () => copyText(message.content)));
    if (message.role === "user") row.append(button(say("edit"), () => this.edit(number)));
    else row.append(button(say("again"), () => this.regenerate(number)));
    if (isLast && message.role === "assistant") {
      row.append(button(say("go"), () => this.goOn(message)));
    }
    row.append(button(say("branch"), () => this.open(store.branch(this.current, number + 1))));
    return row;
  }

  // What follows an edited message stays in the conversation that it is branched from.
  edit(number) {
    if (!at("chat-stop").hidden) return;
    at("chat-text").value = this.current.messages[number].content;
    this.open(store.branch(this.current, number));
    at("chat-text").focus();
  }

  // The last answer is replaced; an earlier one begins a branch.
  regenerate(number) {
    if (!at("chat-stop").hidden) return;
    if (number === this.current.messages.length - 1) this.current.messages.pop();
    else this.current = store.branch(this.current, number);
    this.show();
    this.answer({ role: "assistant", content: "" });
  }

  goOn(message) {
    if (!at("chat-stop").hidden) return;
    at("said").lastElementChild.remove();
    this.answer(message, { continue_final_message: true });
  }

  // --- the list of conversations ---

  showSaved() {
    const { say } = this.app;
    const shown = store.search(this.all, at("search").value).filter((one) => one.messages.length);
    at("saved").replaceChildren(...shown.map((conversation) => {
      const name = button(store.titleOf(conversation), () => this.open(conversation), "quiet title");
      name.title = new Date(conversation.time).toLocaleString();
      if (conversation === this.current) name.ariaCurrent = "true";
      const remove = button("×", () => this.remove(conversation));
      remove.ariaLabel = say("remove");
      return make("div", { className: "saved" }, name, remove);
    }));
  }

  remove(conversation) {
    if (!confirm(this.app.say("removeAsk", store.titleOf(conversation)))) return;
    this.all = this.all.filter((one) => one !== conversation);
    if (conversation === this.current) this.begin();
    this.keep(conversation.id);
  }

  exportAll() {
    const text = JSON.stringify(this.all.filter((one) => one.messages.length), null, 2);
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    make("a", { href: url, download: "conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  async importFile() {
    const [file] = at("import-file").files;
    if (!file) return;
    try {
      this.all = store.merge(this.all, store.parseConversations(await file.text()));
      this.current = this.all.find((one) => one.id === this.current.id) ?? this.current;
      this.keep();
      this.show();
    } catch (error) {
      this.app.tell(this.app.say("noImport") + error.message);
    }
    at("import-file").value = "";
  }

  async attach() {
    const [file] = at("attach-file").files;
    if (!file) return;
    if (file.size > MOST_BYTES) {
      this.app.tell(this.app.say("large", file.name));
    } else {
      const text = (await file.text()).replace(/\n$/, "");
      const fence = text.includes("```") ? "~~~~" : "```";
      const before = at("chat-text").value ? `${at("chat-text").value}\n` : "";
      at("chat-text").value = `${before}${file.name}:\n${fence}\n${text}\n${fence}\n`;
      at("chat-text").focus();
    }
    at("attach-file").value = "";
  }
}
