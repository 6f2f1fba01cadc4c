// Asks the ingress. Reads only, but for the chat, which is a client like any other.

const TIMEOUT_MS = 5000;

// In memory alone: neither storage nor URL ever holds a key.
export const keys = { operator: "", client: "" };

export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // of HTTP; 0: there was no answer
  }

  get wantsKey() {
    return this.status === 401 || this.status === 403;
  }
}

// Beside the page, wherever that is mounted; without the name and password that a browser may have
// in the page's own address, which fetch() does not take.
function beside(path) {
  return new URL(path, location.origin + location.pathname);
}

function bearer(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

// One JSON answer of a route below /headwater/. Raises Trouble.
export async function getJson(path) {
  let answer;
  try {
    answer = await fetch(beside(path), {
      headers: bearer(keys.operator),
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  } catch (error) {
    const silent = error.name === "TimeoutError";
    throw new Trouble(silent ? `no answer within ${TIMEOUT_MS / 1000} s` : "no connection");
  }
  if (!answer.ok) throw new Trouble(await explained(answer), answer.status);
  try {
    return await answer.json();
  } catch {
    throw new Trouble("the answer broke off, or is no JSON");
  }
}

// Begins a streamed chat answer. Raises Trouble, and AbortError when `signal` aborts.
export async function beginChat(body, name, signal) {
  let answer;
  try {
    answer = await fetch(beside("../v1/chat/completions"), {
      method: "POST",
      headers: {
        "content-type": "application/json",
        "x-request-id": name,
        ...bearer(keys.client),
      },
      body: JSON.stringify(body),
      credentials: "omit", // the operator's own never go with a client's request
      cache: "no-store",
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("no connection to the server");
  }
  if (!answer.ok) throw new Trouble(await explained(answer), answer.status);
  return answer;
}

// The data of each server-sent event of an answer, as it comes.
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever reads no further has done with the answer
  }
}

async function explained(answer) {
  try {
    const { error } = await answer.json();
    if (error?.message) return `${error.message} (HTTP ${answer.status})`;
  } catch {
    // not one of our errors: a proxy's page, say
  }
  return `HTTP ${answer.status}`;
}
