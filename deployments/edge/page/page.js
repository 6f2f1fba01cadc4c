// Looks at the ingress again and again and has the rest of the page show what it says. When it is
// gone, says so, keeps what was shown, and looks on until it is back. A page that nobody sees rests.
// `?interval=0.5` sets the seconds between two looks.

import * as chat from "./chat.js";
import { byId, setData, setHidden, setText } from "./dom.js";
import { showSlabs, showStatus } from "./fleet.js";
import { clock } from "./format.js";
import * as requests from "./requests.js";
import { getJson, keys } from "./server.js";
import * as way from "./way.js";

const INTERVAL_MIN_S = 0.1;
const BACKOFF = [1, 1, 2, 5]; // times the interval, after so many failures
const TITLE = document.title;
const INGRESSES_MAX = 64;
const LOOKS_APART = 20;
const KEYS_OF_STATUS = ["workers", "requests", "cache", "directory", "admission", "degraded"];

const given = Number(new URLSearchParams(location.search).get("interval"));
const intervalMs = 1e3 * (given >= INTERVAL_MIN_S ? given : 1);
let model = "";
let ingress = "";
const seen = new Set(); // the ingresses that have answered
let alternatedAt = -Infinity; // the look at which one answered again after another
let looks = 0;
let failures = 0;
let lastHeard = null;
let wake = () => {};

async function look() {
  const status = await getJson("status");
  if (!KEYS_OF_STATUS.every((key) => key in status)) {
    throw new Error("another version of Headwater answers: load this page again");
  }
  looks += 1;
  model = status.model;
  showIngress(status.ingress);
  showStatus(status);
  requests.showRequests(await getJson("live/requests?count=10"));
  if (looks % 2 === 1) showSlabs((await getJson("ledger?scan=false&owners=false")).nodes);
}

// Behind a balancer several ingresses answer in turn; one that was started anew does not come back.
function showIngress(name) {
  if (name !== ingress && seen.has(name)) alternatedAt = looks;
  seen.add(name);
  if (seen.size > INGRESSES_MAX) seen.delete(seen.values().next().value);
  ingress = name;
  const several = `Several ingresses answer in turn, now ${name}: each knows its own requests alone.`;
  setText(byId("ingress"), looks - alternatedAt < LOOKS_APART ? several : name);
}

// What a tab in the background can tell.
function entitle(what) {
  const title = what ? `${what} – ${TITLE}` : TITLE;
  if (document.title !== title) document.title = title;
}

function heard() {
  failures = 0;
  lastHeard = new Date();
  setHidden(byId("trouble"), true);
  setText(byId("trouble"), "");
  setText(byId("state"), "Live");
  entitle(byId("degraded").hidden ? "" : "Degraded");
  setData(byId("state"), "state", "live");
  setData(document.body, "old", "no");
}

function failed(trouble) {
  failures += 1;
  const known = lastHeard ? `What follows is of ${clock(lastHeard)}. ` : "";
  const what = trouble.wantsKey
    ? `The server asks for its operator key: ${trouble.message}. Give it under Keys.`
    : `The server does not answer as it should: ${trouble.message}. ${known}` +
      "This page looks again by itself.";
  if (trouble.wantsKey && failures === 1) byId("keys").open = true;
  setText(byId("trouble"), what);
  setHidden(byId("trouble"), false);
  const state = trouble.wantsKey ? "Key wanted" : "No answer";
  setText(byId("state"), state);
  entitle(state);
  setData(byId("state"), "state", "gone");
  setData(document.body, "old", lastHeard ? "yes" : "no");
}

// Ends early when there is a reason to look at once; while nobody sees the page, it does not end.
async function pause(ms) {
  const woken = new Promise((resolve) => (wake = resolve));
  await Promise.race([woken, new Promise((resolve) => setTimeout(resolve, ms))]);
  while (document.hidden) await new Promise((resolve) => (wake = resolve));
}

async function main() {
  byId("keys-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keys.operator = byId("operator-key").value.trim();
    keys.client = byId("client-key").value.trim();
    byId("keys").open = false;
    failures = 0;
    wake();
  });
  document.addEventListener("visibilitychange", () => document.hidden || wake());
  addEventListener("online", () => wake());
  setText(byId("state"), "Asking");
  requests.begin(way.open);
  chat.begin(() => model, way);
  for (;;) {
    try {
      await look();
      heard();
    } catch (trouble) {
      failed(trouble);
    }
    await pause(intervalMs * (failures ? BACKOFF[Math.min(failures, BACKOFF.length) - 1] : 1));
  }
}

main();
