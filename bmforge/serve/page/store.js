// Conversations as the browser keeps them: plain objects, functions without side effects on the page.

const KEY = "bmforge.conversations";
const ROLES = ["user", "assistant"];

export function newConversation(settings = {}) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, title: "", time: Date.now(), dropped: 0, settings: { ...settings }, messages: [] };
}

export function titleOf(conversation) {
  return conversation.title || (conversation.messages[0]?.content ?? "").trim().slice(0, 60);
}

// Return a copy of a conversation up to a message, which goes on in another way.
export function branch(conversation, count) {
  const messages = conversation.messages.slice(0, count).map((message) => ({ ...message }));
  return { ...newConversation(conversation.settings), messages };
}

export function search(conversations, text) {
  const wanted = text.trim().toLowerCase();
  const has = (conversation) => titleOf(conversation).toLowerCase().includes(wanted)
    || conversation.messages.some((message) => message.content.toLowerCase().includes(wanted));
  return conversations.filter(has).sort((a, b) => b.time - a.time);
}

// The messages that are sent: without the oldest turns that no longer fit.
export function sentMessages(conversation) {
  const { messages, dropped, settings } = conversation;
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const said = messages.slice(dropped).map(({ role, content }) => ({ role, content }));
  return [...system, ...said];
}

// Leave out one more of the oldest turns; false if only the last message remains.
export function dropTurn(conversation) {
  const { messages, dropped } = conversation;
  let next = dropped + 1;
  while (next < messages.length && messages[next].role !== "user") next += 1;
  if (next >= messages.length) return false;
  conversation.dropped = next;
  return true;
}

const isMessage = (value) => ROLES.includes(value?.role) && typeof value.content === "string";

// Read conversations from JSON; an error names what is wrong, and nothing is taken then.
export function parseConversations(text) {
  const values = JSON.parse(text);
  if (!Array.isArray(values)) throw new Error("a list of conversations is needed");
  return values.map((value, number) => {
    if (!Array.isArray(value?.messages) || !value.messages.every(isMessage)) {
      throw new Error(`conversation ${number + 1} has no messages of user and assistant`);
    }
    const messages = value.messages.map(({ role, content, thoughts }) => (
      typeof thoughts === "string" ? { role, content, thoughts } : { role, content }));
    const settings = {};
    for (const [name, setting] of Object.entries(value.settings ?? {})) {
      if (["string", "number"].includes(typeof setting)) settings[name] = setting;
    }
    const fresh = newConversation(settings);
    const dropped = Number.isInteger(value.dropped) ? Math.min(value.dropped, messages.length) : 0;
    return {
      ...fresh, messages, dropped: Math.max(0, dropped),
      id: typeof value.id === "string" ? value.id : fresh.id,
      time: Number.isFinite(value.time) ? value.time : fresh.time,
      title: typeof value.title === "string" ? value.title : "",
    };
  });
}

// Add conversations; one with the same id is replaced only by a later one.
export function merge(conversations, others) {
  const all = new Map(conversations.map((one) => [one.id, one]));
  for (const other of others) {
    if (!all.has(other.id) || all.get(other.id).time < other.time) all.set(other.id, other);
  }
  return [...all.values()];
}

export function load(storage) {
  const text = storage.getItem(KEY) ?? "[]";
  try {
    return parseConversations(text);
  } catch {
    storage.setItem(`${KEY}.unreadable`, text); // so that saving does not lose it
    return [];
  }
}

export function save(storage, conversations) {
  storage.setItem(KEY, JSON.stringify(conversations.filter((one) => one.messages.length)));
}
