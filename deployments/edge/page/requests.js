// The slowest and the newest requests; opening one fetches its story, as `headwater explain` has it.

import { byId, keyed, make, setData, setHidden, setText } from "./dom.js";
import { count, ms, plural, seconds, short } from "./format.js";
import { getJson } from "./server.js";

let shown = { slowest: [], newest: [], looked_at: 0 };
let openWay = () => {};

export function begin(showWay) {
  openWay = showWay;
  for (const button of document.querySelectorAll("input[name=order]")) {
    button.addEventListener("change", draw);
  }
}

export function showRequests(found) {
  shown = found;
  draw();
}

function draw() {
  const order = document.querySelector("input[name=order]:checked").value;
  const list = byId("request-rows");
  const rows = shown[order];
  const names = new Set(rows.map((row) => row.trace_id));
  // What somebody has open stays until it is closed.
  const held = [...list.children]
    .filter((node) => node.row && node.firstElementChild.open && !names.has(node.dataset.key))
    .map((node) => node.row);
  keyed(list, [...rows, ...held], (row) => row.trace_id, create, update);
  setHidden(byId("no-requests"), list.children.length > 0);
  setText(
    byId("requests-told"),
    shown.looked_at ? `Of the newest ${plural(shown.looked_at, "request")} at this ingress.` : "",
  );
}

function create() {
  const item = make("li");
  const box = make("details", "request");
  const summary = make("summary");
  summary.append(make("b"), make("span"), make("span", "dim"));
  const story = make("pre");
  const way = make("button", "", "Show its way above");
  way.type = "button";
  way.addEventListener("click", () => openWay(item.row.trace_id));
  box.append(summary, way, story); // the button stays in its place when the story comes
  box.addEventListener("toggle", () => box.open && tell(item, story));
  item.append(box);
  return item;
}

function update(item, row) {
  const changed = item.row && item.row.outcome !== row.outcome;
  item.row = row;
  const box = item.firstElementChild;
  const [wait, what, when] = box.firstElementChild.children;
  setText(wait, row.waited_ms === null ? "no token" : ms(row.waited_ms));
  setText(what, told(row));
  setText(when, `${short(row.trace_id)}, ${seconds(row.age_s)} ago`);
  setData(box, "state", row.outcome ?? "running");
  if (changed && box.open) tell(item, box.querySelector("pre"));
}

function told(row) {
  const parts = [];
  if (!row.has_token && row.waited_ms !== null) parts.push("waits still");
  if (row.most) parts.push(`${row.most.part} ${ms(row.most.ms)}`);
  parts.push(`${count(row.prompt_tokens)} tokens in, ${count(row.output_tokens)} out`);
  parts.push(row.outcome ?? "running");
  if (row.detail) parts.push(row.detail);
  if (row.choices > 1) parts.push(plural(row.choices, "choice"));
  if (row.workers.length) parts.push(row.workers.join(" > "));
  return parts.join(", ");
}

async function tell(item, story) {
  try {
    const found = await getJson(`requests/${encodeURIComponent(item.row.trace_id)}`);
    setText(story, found.story);
  } catch (trouble) {
    setText(story, `Its story cannot be had: ${trouble.message}.`);
  }
}
