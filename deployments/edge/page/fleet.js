// Workers, slabs, queue, caches and directory: what `headwater status` shows, from the same answers.

import { byId, keyed, make, setCells, setData, setHidden, setText } from "./dom.js";
import { count, percent, plural, seconds, short } from "./format.js";

const ROW = () => make("tr");

export function showStatus(status) {
  setText(byId("model"), status.model);
  const degraded = byId("degraded");
  setHidden(degraded, status.degraded.length === 0);
  keyed(degraded, unique(status.degraded), (what) => what, () => make("li"), setText);
  showWorkers(status.workers);
  showFigures(status);
  showDirectory(status.directory);
}

function unique(items) {
  return [...new Set(items)];
}

function showWorkers(workers) {
  setHidden(byId("workers"), workers.length === 0);
  setHidden(byId("no-workers"), workers.length > 0);
  setText(byId("no-workers"), "No worker yet.");
  keyed(byId("worker-rows"), workers, (worker) => worker.id, ROW, showWorker);
}

function showWorker(row, worker) {
  const linked = "free_blocks" in worker;
  const prompts = worker.prompt_tokens_total;
  const state = worker.why ? `${worker.state}: ${worker.why}` : worker.state;
  setData(row, "state", worker.state);
  setCells(row, [
    ["Worker", worker.id],
    ["Role", worker.role],
    ["State", worker.degraded ? `${state} (${worker.degraded})` : state, "state"],
    ["Running", count(worker.running), "number"],
    ["Waiting", count(worker.waiting), "number"],
    ["Queued", count(worker.queued_tokens), "number"],
    [
      "KV free",
      linked ? `${count(worker.free_blocks)} of ${count(worker.total_blocks)}` : count(undefined),
      "number wide",
    ],
    ["Published", count(worker.blocks_published_total), "number"],
    ["Loaded", count(worker.blocks_loaded_total), "number"],
    ["Cached", percent(prompts ? worker.cached_tokens_total / prompts : undefined), "number"],
  ]);
}

export function showSlabs(nodes) {
  setHidden(byId("slabs"), nodes.length === 0);
  keyed(byId("slab-rows"), nodes, (node) => node.node, ROW, (row, node) => {
    const books = node.books ?? {};
    setData(row, "state", node.error ? "error" : "ready");
    setCells(row, [
      ["Node", short(node.node)],
      ["Slots", count(books.slots_total), "number"],
      ["Free", count(books.free), "number"],
      ["Published", count(books.published), "number"],
      ["Filling", count(books.filling), "number"],
      ["Quarantined", count(books.quarantined), "number"],
      ["Leased", count(books.leased_slots), "number"],
      ["Leases", count(books.leases?.length), "number"],
    ]);
  });
  const errors = nodes.filter((node) => node.error);
  setText(
    byId("slabs-told"),
    errors.map((node) => `${short(node.node)}: ${node.error}`).join("; "),
  );
}

function showFigures(status) {
  const { requests, admission, cache, audits, router } = status;
  const flying = Object.entries(requests.in_flight).filter(([, n]) => n);
  const ended = Object.entries(requests.outcomes).map(
    ([how, n]) => `${count(n)} ${how === "refused" ? "rejected" : how}`,
  );
  const audited = Object.entries(audits.outcomes).map(([how, n]) => `${count(n)} ${how}`);
  const figures = [
    ["Requests now", flying.map(([stage, n]) => `${count(n)} ${stage}`).join(", ") || "none"],
    [
      "Queue",
      `${count(admission.in_flight)} of ${count(admission.limit)} places taken, ` +
        `${count(admission.slots)} of them engine slots` +
        (admission.refused_total
          ? `; ${count(admission.refused_total)} of the rejected requests found no free place`
          : ""),
    ],
    ["Ended", ended.join(", ")],
    [
      "Cached",
      `${percent(cache.last_minute.cached_share)} of ` +
        `${plural(cache.last_minute.prompt_tokens, "prompt token")} in the last minute; ` +
        `${percent(cache.total.cached_share)} of ${count(cache.total.prompt_tokens)} in all`,
    ],
    [
      "Hand-overs",
      `${count(requests.handovers_total)}, with ${plural(requests.resumes_total, "resume")} ` +
        `and ${plural(requests.role_fallbacks_total, "role fallback")}`,
    ],
  ];
  if (router) {
    figures.push([
      "Index",
      `${count(router.index_blocks)} of ${count(router.index_blocks_max)} blocks known`,
    ]);
  }
  if (audits.share || Object.values(audits.outcomes).some((n) => n)) {
    figures.push(["Audits of reused KV", audited.join(", ")]);
  }
  for (const note of status.scaling ?? []) {
    const size = `${count(note.replicas)}, of ${note.replicas_min} to ${note.replicas_max}`;
    figures.push([`Autoscaling ${note.role}`, `${size}; ${note.action}: ${note.why}`]);
  }
  for (const way of unique(status.workers.map((worker) => worker.kv_copies).filter(Boolean))) {
    const names = status.workers.filter((worker) => worker.kv_copies === way);
    figures.push([`Block copies, ${way}`, names.map((worker) => worker.id).join(", ")]);
  }
  pairs(byId("figures"), figures);
}

// A description list of [term, text].
export function pairs(list, items) {
  keyed(
    list,
    items,
    ([term]) => term,
    () => {
      const group = make("div");
      group.append(make("dt"), make("dd"));
      return group;
    },
    (group, [term, text]) => {
      setText(group.firstElementChild, term);
      setText(group.lastElementChild, text);
    },
  );
}

function showDirectory(directory) {
  const age = directory.heard_age_s;
  keyed(
    byId("sources"),
    directory.sources,
    (source) => source.source,
    () => {
      const row = make("li");
      row.append(make("span"), make("span", "tag"));
      return row;
    },
    (row, source) => {
      const why = source.reason ? ` (${source.reason})` : "";
      setText(row.firstElementChild, `${short(source.source)}: ${plural(source.blocks, "block")}`);
      setText(row.lastElementChild, source.freshness + why);
      setData(row.lastElementChild, "state", source.freshness);
    },
  );
  // "unknown_source" is no trouble: a worker that ran before this ingress connected to it.
  const troubles = Object.entries(directory.degraded_total)
    .filter(([why]) => why !== "unknown_source")
    .map(([why, n]) => `${n} ${why}`);
  const heard = age === null ? "not heard from" : `heard ${seconds(age)} ago`;
  setText(
    byId("directory-told"),
    `Directory ${heard}; ${directory.sources.length ? "" : "no blocks yet; "}` +
      `digests ${count(directory.digests_equal_total)} equal, ` +
      `${count(directory.digests_differ_total)} different; ` +
      `${troubles.length ? `out of sync: ${troubles.join(", ")}` : "never out of sync"}.`,
  );
}
