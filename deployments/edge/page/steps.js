// The steps of a request in words, from its record as `headwater explain` reads it. Pure.
// A step is [name, state, words]; its state is done, doing, waiting, skipped or failed.

import { count, ms, plural, seconds } from "./format.js";

export function stepsOf(record, usage) {
  const first = record.attempts.find((attempt) => attempt.first_output_s !== null);
  const last = record.attempts.at(-1);
  const over = record.outcome !== null;
  return [
    tokenised(record),
    routed(record, over),
    computed(record, first, over),
    moved(record, over),
    firstToken(record, first, over),
    decoded(record, last, over),
    ended(record, usage, over),
  ];
}

function tokenised(record) {
  const took = record.ttft ? ` in ${ms(record.ttft.tokenise_ms)}` : "";
  return ["Tokenised", "done", `${plural(record.prompt_tokens, "prompt token")}${took}`];
}

function routed(record, over) {
  const plan = record.decisions.at(-1);
  if (!plan) return ["Routed", over ? "failed" : "doing", over ? "nowhere" : "waits for a worker"];
  const where = plan.prefill
    ? `prefill on ${plan.prefill}, then decode on ${plan.decode}`
    : `all of it on ${plan.decode}`;
  const again = record.decisions.length > 1 ? `, decision ${record.decisions.length}` : "";
  return [
    "Routed",
    "done",
    `${where} (${plan.reason}${again}); ${plural(plan.cached_tokens, "token")} known to be ` +
      `cached, first token predicted after ${ms(plan.predicted_ttft_ms)}`,
  ];
}

function computed(record, first, over) {
  const attempt = first ?? record.attempts.at(-1);
  if (!attempt) return ["Prefill", over ? "skipped" : "waiting", over ? "never begun" : ""];
  const parts = [`on ${attempt.worker}`];
  if (attempt.timing) {
    parts.push(`queued ${ms(1e3 * attempt.timing.queue_s)}`);
    parts.push(`computed ${ms(1e3 * attempt.timing.compute_s)}`);
  }
  if (attempt.kv) {
    parts.push(`${plural(attempt.kv.local_tokens, "token")} in the engine's own cache`);
  }
  const state = first ? "done" : over || attempt.ended_s !== null ? "failed" : "doing";
  return ["Prefill", state, parts.join(", ")];
}

function moved(record, over) {
  const sum = (name) => record.attempts.reduce((all, one) => all + (one.kv?.[name] ?? 0), 0);
  const told = record.attempts.filter((attempt) => attempt.kv);
  const blocks = sum("published_blocks") + sum("loaded_blocks") + sum("failed_blocks");
  if (!told.length) {
    const words = record.attempts.length && !over ? "told when an attempt ends" : "";
    return ["Blocks moved", over ? "skipped" : "waiting", over ? "none" : words];
  }
  const parts = [`${count(sum("published_blocks"))} published, ${count(sum("loaded_blocks"))} loaded`];
  if (sum("load_s")) parts[0] += ` in ${ms(1e3 * sum("load_s"))}`;
  if (sum("pulled_blocks")) {
    parts.push(`${count(sum("pulled_blocks"))} of them from other nodes in ${ms(1e3 * sum("pull_s"))}`);
  }
  if (sum("prefetched_blocks")) parts.push(`${count(sum("prefetched_blocks"))} ahead of time`);
  if (sum("failed_blocks")) {
    parts.push(`${count(sum("failed_blocks"))} failed to load and were computed again`);
  }
  const wrong = told.map((attempt) => attempt.kv.pull_failure).filter(Boolean);
  if (wrong.length) parts.push(`pull ended early: ${wrong.join(", ")}`);
  const state = told.length < record.attempts.length && !over ? "doing" : blocks ? "done" : "skipped";
  return ["Blocks moved", state, parts.join("; ")];
}

function firstToken(record, first, over) {
  if (!first) return ["First token", over ? "skipped" : "waiting", over ? "none came" : ""];
  if (!record.ttft) return ["First token", "done", `on ${first.worker}`];
  const predicted = record.decisions[0]?.predicted_ttft_ms;
  const words = typeof predicted === "number" ? `, predicted ${ms(predicted)}` : "";
  return ["First token", "done", `after ${ms(record.ttft.total_ms)}${words}`];
}

function decoded(record, last, over) {
  if (!last || last.role !== "decode" || last.first_output_s === null) {
    const handing = last?.role === "decode" || last?.outcome === "handed over";
    const state = over ? "skipped" : handing ? "doing" : "waiting";
    const words = !over && last?.role === "decode" ? `handed to ${last.worker}` : "";
    return ["Decode", state, over ? `${plural(record.output_tokens, "token")} in all` : words];
  }
  const parts = [`on ${last.worker}`, plural(last.tokens, "token")];
  const tookS = (last.ended_s ?? 0) - last.first_output_s;
  if (last.tokens > 1 && tookS > 0) parts.push(`${((last.tokens - 1) / tookS).toFixed(1)} tokens/s`);
  const lost = record.attempts.filter((attempt) => attempt.outcome.startsWith("lost")).length;
  if (lost) parts.push(`went on after ${plural(lost, "lost attempt")}`);
  return ["Decode", over ? "done" : "doing", parts.join(", ")];
}

function ended(record, usage, over) {
  if (!over) return ["Ended", "waiting", ""];
  const parts = [record.outcome, plural(record.output_tokens, "token")];
  if (record.duration_s !== null) parts.push(`after ${seconds(record.duration_s)}`);
  if (record.detail) parts.push(record.detail);
  // As the client was told; of a request that is not the chat's, as its record has it.
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? record.cached_tokens;
  if (typeof cached === "number") {
    parts.push(`${count(cached)} of ${plural(record.prompt_tokens, "prompt token")} cached`);
  }
  return ["Ended", record.outcome === "finished" ? "done" : "failed", parts.join(", ")];
}
