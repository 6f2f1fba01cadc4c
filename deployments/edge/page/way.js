// The way of one request: the chat's own as it goes, or one that somebody opened. From the record
// that `headwater explain` reads.

import { byId, keyed, make, setCells, setData, setHidden, setText } from "./dom.js";
import { pairs } from "./fleet.js";
import { count, ms, plural, short } from "./format.js";
import { getJson } from "./server.js";
import { stepsOf } from "./steps.js";

const POLL_MS = 250;
const MISSES_TOLD = 3;
const MISSES_MAX = 8;
const SIGNS = { done: "✓", doing: "▸", waiting: "·", skipped: "–", failed: "✗" };
const PARTS = {
  tokenise: "Tokenise",
  queue: "Queue",
  prefill: "Prefill",
  publish: "Publish",
  handover: "Hand-over",
  delivery: "Delivery",
};
const TERMS = {
  queue_ms: "Queue",
  compute_ms: "Compute",
  load_ms: "Load",
  handoff_ms: "Hand-off",
  decode_ms: "Decode",
  caused_ms: "Delay to others",
};

let current = null; // {traceId, name, beganMs, usage, over, found, misses}

export function began(name) {
  show({ traceId: "", name, over: false });
}

export function named(traceId, name) {
  if (current?.name === name && traceId) current.traceId = traceId;
}

export function used(usage, name) {
  if (current?.name !== name) return;
  current.usage = usage;
  draw(current);
}

export function ended(name) {
  if (current?.name === name) current.over = true;
}

export function open(traceId) {
  show({ traceId, name: "", over: true });
  byId("way-title").scrollIntoView({ block: "start" });
  byId("way-title").tabIndex = -1;
  byId("way-title").focus({ preventScroll: true });
}

function show(what) {
  current = { beganMs: performance.now(), usage: null, found: null, misses: 0, ...what };
  setData(byId("way-body"), "of", "before");
  setText(byId("way-name"), what.traceId ? `Asking for ${what.traceId}.` : "Sent; not tokenised yet.");
  follow(current);
}

// Asks until the request has ended. A stream's headers, which name its request, leave with the first
// token: until then it is found by the name that the chat gave it.
async function follow(mine) {
  while (mine === current) {
    try {
      const known = mine.traceId || (await traceOf(mine.name));
      if (mine !== current) return;
      mine.traceId = known;
      if (known) {
        const found = await getJson(`requests/${encodeURIComponent(known)}`);
        if (mine !== current) return;
        mine.found = found;
        mine.misses = 0;
        draw(mine);
        if (mine.over && found.records.every((record) => record.outcome !== null)) return;
      } else if (mine.over) {
        mine.misses += 1;
      }
      if (mine.misses > MISSES_MAX) {
        return setText(byId("way-name"), "It left no record: it ended before it was tokenised.");
      }
    } catch (trouble) {
      mine.misses += 1;
      if (mine !== current) return;
      // One look that misses may have met an ingress that knows other requests.
      if (mine.misses >= MISSES_TOLD) {
        setText(byId("way-name"), `${mine.traceId || "Its record"}: ${trouble.message}.`);
      }
      if (mine.misses > MISSES_MAX) return;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

async function traceOf(name) {
  const found = await getJson(`live/requests?count=0&named=${encodeURIComponent(name)}`);
  return found.named ?? "";
}

function draw(mine) {
  if (!mine.found) return;
  const { records, story } = mine.found;
  const [record] = records;
  const choice = records.length > 1 ? `, choice 1 of ${records.length}` : "";
  setText(byId("way-name"), `Request ${mine.traceId}${choice}`);
  setHidden(byId("way-body"), false);
  setData(byId("way-body"), "of", "now");
  keyed(byId("steps"), stepsOf(record, mine.usage), ([name]) => name, createStep, updateStep);
  drawTtft(record);
  drawAttempts(record);
  keyed(
    byId("decisions"),
    record.decisions.map((decision, index) => ({ decision, index })),
    ({ index }) => `${mine.traceId} ${index}`,
    createDecision,
    updateDecision,
  );
  setText(byId("story"), story);
}

function createStep() {
  const step = make("li");
  step.append(make("span", "sign"), make("b"), make("span", "words"));
  step.firstElementChild.ariaHidden = "true";
  return step;
}

function updateStep(step, [name, state, words]) {
  const [sign, title, told] = step.children;
  setData(step, "state", state);
  setText(sign, SIGNS[state]);
  setText(title, name);
  setText(told, words || state);
}

function drawTtft(record) {
  const { ttft } = record;
  setHidden(byId("ttft-bar"), !ttft);
  setText(
    byId("ttft-told"),
    ttft ? `${ms(ttft.total_ms)} in all` : "None yet: no token has been delivered.",
  );
  const parts = ttft
    ? Object.keys(PARTS).map((part) => ({ part, took: ttft[`${part}_ms`] }))
    : [];
  pairs(
    byId("ttft-parts"),
    parts.map(({ part, took }) => [PARTS[part], ms(took)]),
  );
  parts.forEach(({ part }, index) => setData(byId("ttft-parts").children[index], "part", part));
  keyed(
    byId("ttft-bar"),
    parts,
    ({ part }) => part,
    () => make("span"),
    (bar, { part, took }) => {
      setData(bar, "part", part);
      bar.style.flexGrow = String(Math.max(0, took));
    },
  );
}

// Bars on one scale of time: from when the request was received to its end, or to now.
function drawAttempts(record) {
  const times = record.attempts.flatMap((one) => [one.submitted_s, one.first_output_s, one.ended_s]);
  const running = record.outcome === null && current.name !== "";
  const nowS = running ? (performance.now() - current.beganMs) / 1e3 : 0;
  const endS = Math.max(record.duration_s ?? nowS, ...times.filter((time) => time !== null), 1e-3);
  const numbered = record.attempts.map((attempt, index) => ({ attempt, index }));
  const key = ({ index }) => `${current.traceId} ${index}`;
  keyed(byId("attempts"), numbered, key, createAttempt, (row, { attempt }) => {
    const [words, track] = row.children;
    const untilS = attempt.ended_s ?? endS;
    const waited = attempt.first_output_s ?? untilS;
    setText(words, attemptWords(attempt));
    const [before, work, after] = track.children;
    before.style.flexGrow = String(attempt.submitted_s);
    work.firstElementChild.style.flexGrow = String(Math.max(0, waited - attempt.submitted_s));
    work.lastElementChild.style.flexGrow = String(Math.max(0, untilS - waited));
    work.style.flexGrow = String(Math.max(endS / 200, untilS - attempt.submitted_s));
    after.style.flexGrow = String(Math.max(0, endS - untilS));
  });
}

function createAttempt() {
  const row = make("div", "attempt");
  const track = make("div", "track");
  track.ariaHidden = "true";
  const work = make("span", "work");
  work.append(make("span", "wait"), make("span", "run"));
  track.append(make("span"), work, make("span"));
  row.append(make("p"), track);
  return row;
}

function attemptWords(attempt) {
  const resumed = attempt.resumed_tokens
    ? `, with ${plural(attempt.resumed_tokens, "token")} made before`
    : "";
  const kv = attempt.kv;
  const blocks = kv
    ? `; ${count(kv.loaded_blocks)} blocks loaded, ${count(kv.computed_tokens)} tokens computed (prompt and output), ` +
      `${count(kv.published_blocks)} blocks published`
    : "";
  const from = attempt.pull_from ? `; blocks from node ${short(attempt.pull_from)}` : "";
  return (
    `${ms(1e3 * attempt.submitted_s)}: ${attempt.worker} as ${attempt.role} ` +
    `(${attempt.why}${resumed}): ${plural(attempt.tokens, "token")}, ${attempt.outcome}${blocks}${from}`
  );
}

function createDecision() {
  const box = make("div");
  const table = make("table", "cards");
  const head = make("thead");
  const row = make("tr");
  const names = ["Prefill > decode", "Cost", ...Object.values(TERMS), "Cached tokens", "TTFT"];
  for (const name of names) {
    const cell = make("th", name === names[0] ? "" : "number", name);
    cell.scope = "col";
    row.append(cell);
  }
  head.append(row);
  table.append(head, make("tbody"));
  box.append(make("p", "dim"), table);
  return box;
}

function updateDecision(box, { decision, index }) {
  const [told, table] = box.children;
  const chosen = (one) => one.prefill === decision.prefill && one.decode === decision.decode;
  const doubts = decision.degraded_sources.length
    ? ` The directory was not sure of ${decision.degraded_sources.join(", ")}.`
    : "";
  const pull = decision.pull_from ? ` Blocks come from node ${short(decision.pull_from)}.` : "";
  setText(
    told,
    `${index ? `Decision ${index + 1}: ` : ""}${decision.reason}, of ` +
      `${plural(decision.candidates_total, "candidate")}; in milliseconds.${pull}${doubts}`,
  );
  keyed(
    table.lastElementChild,
    decision.candidates,
    (one) => `${one.prefill ?? ""} ${one.decode}`,
    () => make("tr"),
    (row, one) => {
      setData(row, "chosen", chosen(one) ? "yes" : "no");
      const way = `${one.prefill ?? "–"} > ${one.decode}`;
      setCells(row, [
        ["Prefill > decode", chosen(one) ? `${way} (chosen)` : way],
        ["Cost", whole(one.cost_ms), "number"],
        ...Object.entries(TERMS).map(([term, name]) => [name, whole(one.terms[term]), "number"]),
        ["Cached tokens", count(one.cached_tokens), "number"],
        ["TTFT", whole(one.predicted_ttft_ms), "number"],
      ]);
    },
  );
}

function whole(value) {
  return count(Math.round(value));
}
