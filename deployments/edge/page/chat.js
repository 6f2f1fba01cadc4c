// The chat box: an ordinary client of /v1/chat/completions. Keeps the last TURNS_MAX messages, on the
// screen and in what it sends.

import { byId, make, setHidden, setText } from "./dom.js";
import { count, ms, percent } from "./format.js";
import { Trouble, beginChat, eventsOf } from "./server.js";

const TURNS_MAX = 40;
const ANSWER_CHARS_MAX = 200_000;

let messages = [];
let running = null; // the AbortController of the answer that comes
let modelOf = () => "";
let follow = null;

// model(): its name. way: {began(name), named(traceId, name), used(usage, name), ended(name)}.
export function begin(model, way) {
  modelOf = model;
  follow = way;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("forget").addEventListener("click", forget);
}

function forget() {
  running?.abort();
  messages = [];
  for (const turn of byId("turns").querySelectorAll(".turn")) turn.remove();
  setHidden(byId("no-turns"), false);
  byId("question").focus();
}

function addTurn(role, text) {
  const turns = byId("turns");
  const turn = make("div", `turn ${role}`);
  const said = make("div", "said", text);
  const note = make("p", "dim");
  turn.append(make("b", "", role === "user" ? "You" : "Model"), said, note);
  turns.append(turn);
  setHidden(byId("no-turns"), true);
  const shown = turns.querySelectorAll(".turn");
  for (let index = 0; index < shown.length - TURNS_MAX; index++) shown[index].remove();
  turns.scrollTop = turns.scrollHeight;
  return { said, note, turn };
}

async function send() {
  const question = byId("question");
  const text = question.value.trim();
  if (!text || running) return;
  if (!modelOf()) return news("The server has not said yet which model it has.");
  question.value = "";
  messages = [...messages, { role: "user", content: text }].slice(-TURNS_MAX);
  if (messages[0].role === "assistant") messages.shift();
  const asked = messages;
  addTurn("user", text);
  const shown = addTurn("assistant", "");
  running = new AbortController();
  waiting(true);
  const answer = { text: "", usage: null, firstMs: null, endMs: null, whole: false, traceId: "" };
  let trouble = "";
  try {
    await stream(asked, answer, shown, running.signal);
    if (!answer.whole) trouble = "The answer broke off: the connection ended before its end.";
  } catch (error) {
    trouble = error.name === "AbortError" ? "Stopped." : broken(error);
  }
  running = null;
  if (messages === asked && answer.text) {
    messages = [...messages, { role: "assistant", content: answer.text }];
  } else if (messages === asked) {
    messages = messages.slice(0, -1); // nothing was answered: the model has not seen it
  }
  setText(shown.note, [noteOf(answer), trouble].filter(Boolean).join(" "));
  shown.turn.classList.toggle("failed", Boolean(trouble));
  news(trouble || "The answer is complete.");
  waiting(false);
}

function broken(error) {
  if (error instanceof Trouble && error.wantsKey) {
    byId("keys").open = true;
    return `${error.message}. Give an API key under Keys.`;
  }
  return error instanceof Trouble ? error.message : "The connection broke off.";
}

async function stream(asked, answer, shown, signal) {
  const name = `live-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
  const beganMs = performance.now();
  const body = {
    model: modelOf(),
    messages: asked,
    max_tokens: Math.max(1, Math.floor(Number(byId("max-tokens").value)) || 256),
    stream: true,
    stream_options: { include_usage: true },
  };
  follow.began(name);
  const write = writer(shown);
  try {
    const reply = await beginChat(body, name, signal);
    answer.traceId = reply.headers.get("x-headwater-request") ?? "";
    follow.named(answer.traceId, name);
    for await (const data of eventsOf(reply)) {
      if (data === "[DONE]") {
        answer.whole = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Trouble(String(event.error.message ?? "The server failed."));
      const piece = event.choices?.[0]?.delta?.content;
      if (piece) {
        answer.firstMs ??= performance.now() - beganMs;
        answer.endMs = performance.now() - beganMs;
        answer.text = (answer.text + piece).slice(0, ANSWER_CHARS_MAX);
        write(answer.text, false);
      }
      if (event.usage) {
        answer.usage = event.usage;
        follow.used(event.usage, name);
      }
    }
  } finally {
    write(answer.text, true); // before anything is said of the whole
    follow.ended(name);
  }
}

// Draws at most once a frame; a page that nobody sees gets no frames, and draws at once.
function writer(shown) {
  let latest = "";
  let due = false;
  const node = document.createTextNode("");
  shown.said.append(node);
  const draw = () => {
    due = false;
    const turns = byId("turns");
    const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
    node.appendData(latest.slice(node.length)); // an answer only grows
    if (atEnd) turns.scrollTop = turns.scrollHeight;
  };
  return (text, atOnce) => {
    latest = text;
    if (atOnce || document.hidden) draw();
    else if (!due) {
      due = true;
      requestAnimationFrame(draw);
    }
  };
}

function noteOf(answer) {
  const parts = [];
  if (answer.firstMs !== null) parts.push(`first token after ${ms(answer.firstMs)}`);
  const { usage } = answer;
  if (usage) {
    const made = usage.completion_tokens;
    const tookMs = answer.endMs - answer.firstMs;
    parts.push(`${count(made)} tokens`);
    if (made > 1 && tookMs > 0) parts.push(`${((1e3 * (made - 1)) / tookMs).toFixed(1)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const share = percent(usage.prompt_tokens ? cached / usage.prompt_tokens : undefined);
    parts.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached (${share})`);
  }
  return parts.length ? `${parts.join(", ")}.` : "";
}

function news(text) {
  setText(byId("chat-news"), text);
}

function waiting(on) {
  byId("send").disabled = on;
  byId("stop").disabled = !on;
  byId("chat").setAttribute("aria-busy", String(on));
  if (on) news("The model answers.");
}
