// Requests to the server, and its streams of events.

export class ServerError extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

export async function ask(path, body, signal) {
  const options = body && {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" },
  };
  // Relative to this file, so that a proxy may serve the page under a prefix.
  const response = await fetch(new URL(`..${path}`, import.meta.url), { ...options, signal });
  if (!response.ok) {
    const problem = (await response.json().catch(() => null))?.error;
    throw new ServerError(problem?.message ?? `${response.status} ${response.statusText}`, problem?.code);
  }
  return response;
}

export async function* readEvents(response) {
  const decoder = new TextDecoder(); // keeps half of a character until the rest comes
  const reader = response.body.getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new ServerError(data.error.message, data.error.code);
      yield data;
    }
  }
}
